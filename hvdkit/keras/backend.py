"""Horovod on the backend that Keras runs on, TensorFlow or PyTorch.

Whatever differs between the two is here; the rest of the adapter speaks ``keras.ops`` and NumPy.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from hvdkit import trace
from hvdkit.errors import HvdkitError

__all__ = [
    "allgather_bytes",
    "allreduce_tensors",
    "broadcast_bytes",
    "cast",
    "hvd",
    "is_sparse",
    "is_tensorflow",
    "keep_as_written",
    "make_dense",
    "scale",
    "sum_array",
]

_HOROVOD = {"tensorflow": "horovod.tensorflow", "torch": "horovod.torch"}
_OLDEST_KERAS = (3, 5)

# Older ones clip before they accumulate, where the reduction would never be reached.
if tuple(int(part) for part in keras.__version__.split(".")[:2]) < _OLDEST_KERAS:
    raise HvdkitError(
        f"hvdkit needs Keras {'.'.join(map(str, _OLDEST_KERAS))} or later, and {keras.__version__} "
        f"is installed: pip install --upgrade keras"
    )

if keras.backend.backend() not in _HOROVOD:
    raise HvdkitError(
        f"hvdkit.keras runs on the backends {' and '.join(_HOROVOD)}, and Keras is set to "
        f"{keras.backend.backend()}: set KERAS_BACKEND before Keras is imported"
    )

hvd: Any = importlib.import_module(_HOROVOD[keras.backend.backend()])


def is_tensorflow() -> bool:
    """Whether Keras runs on TensorFlow."""
    return bool(keras.backend.backend() == "tensorflow")


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient is TensorFlow's ``IndexedSlices``; on PyTorch Keras has dense ones."""
    return is_tensorflow() and type(gradient).__name__ == "IndexedSlices"


def keep_as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep TensorFlow from rewriting a function, and what it calls, when it is traced."""
    if not is_tensorflow():
        return function
    import tensorflow as tf

    kept: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return kept


def make_dense(gradient: Any) -> Any:
    """Return ``IndexedSlices`` as a tensor, equal indices added up; other gradients as they are."""
    if not is_sparse(gradient):
        return gradient
    # Not keras.ops.convert_to_tensor, which leaves them sparse.
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def cast(gradient: Any, dtype: str) -> Any:
    """Return a gradient, sparse ones too, in another dtype; itself where it has that one."""
    if keras.backend.standardize_dtype(gradient.dtype) == dtype:
        return gradient
    if not is_sparse(gradient):
        return keras.ops.cast(gradient, dtype)
    values = keras.ops.cast(gradient.values, dtype)
    return type(gradient)(values, gradient.indices, gradient.dense_shape)


def scale(gradient: Any, factor: float) -> Any:
    """Return a gradient, sparse ones too, times a factor."""
    if not is_sparse(gradient):
        return gradient * factor
    return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)


def allreduce_tensors(
    tensors: Sequence[Any],
    names: Sequence[str],
    *,
    process_set: Any,
    op: Any = hvd.Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce tensors over the ranks, all at the same time; works inside ``tf.function``.

    Collective: every rank of ``process_set`` must call, with tensors of equal shapes and dtypes.

    Args:
        tensors: Tensors of the backend; on TensorFlow ``IndexedSlices`` too, which are gathered.
        names: One name a tensor, equal on all ranks. On TensorFlow the operation's type is put
            before it: elastic training knows by that what failed.
        process_set: The ranks to reduce over.
        op: ``hvd.Sum``, ``hvd.Average``, or for dense tensors ``hvd.Max``.
        prescale_factor: Each local tensor is multiplied by it before the sum.
        postscale_factor: The result is multiplied by it.
    """
    options = {
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    if is_tensorflow():
        if _is_nested():  # nothing orders these and those of the function around it
            names = [f"{name}.nested" for name in names]
        results = [
            _gather_slices(tensor, name, **options)
            if is_sparse(tensor)
            else hvd.allreduce(tensor, name=name, ignore_name_scope=True, **options)
            for tensor, name in zip(_keep_from_folding(tensors), names, strict=True)
        ]
        _demand_before_repeating(results)
        return results
    # Horovod takes no views with strides, such as the gradient of a transposed weight.
    handles = [
        hvd.allreduce_async(tensor.contiguous(), name=name, **options)
        for tensor, name in zip(tensors, names, strict=True)
    ]
    with trace.span("wait"):
        return [hvd.synchronize(handle) for handle in handles]


def _keep_from_folding(tensors: Sequence[Any]) -> list[Any]:
    """Let no constant reach Horovod's operations inside ``tf.function``.

    TensorFlow takes them for pure functions: with a constant, such as the gradient of a loss
    that has no use for a variable on this rank, it would run them once, while it optimizes the
    graph, and never again. A shape that it learns only when it runs holds it back, costs no
    copy, and is none that it could find to be the same as before.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return list(tensors)
    with tf.device("/CPU:0"):
        one = _turn().read_value() if _is_nested() else tf.cast(tf.timestamp() > 0, "int32")

    def hide(tensor: Any) -> Any:
        if not tensor.shape.is_fully_defined():
            return tensor
        with tf.device("/CPU:0"):
            shape = tf.slice(tf.constant([0, *tensor.shape], tf.int32), [one], [-1])
        hidden = tf.reshape(tensor, shape)
        hidden.set_shape(tensor.shape)
        return hidden

    kept: list[Any] = tf.nest.map_structure(hide, list(tensors), expand_composites=True)
    return kept


def _demand_before_repeating(results: list[Any]) -> None:
    """Let no function or loop run its operations again, by the same names, before they are done.

    TensorFlow takes Horovod's operations for pure functions, and would run iterations of a loop
    at the same time: an operation with a side effect, after them, holds it back. Two calls of one
    function take a variable that they read before and write now.
    """
    import tensorflow as tf

    if not tf.executing_eagerly():
        with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
            _turn().assign(1) if _is_nested() else tf.timestamp()


def _is_nested() -> bool:
    """Whether a function is traced that another one calls.

    Only there the variable is taken: a function that is saved with its module may not have it.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    functions = 0
    while hasattr(graph, "outer_graph"):
        # Bodies of loops and branches are graphs of their own in the same function.
        functions += type(graph).__name__ == "FuncGraph"
        graph = graph.outer_graph
    return functions > 1


@functools.cache
def _turn() -> Any:
    """Return the variable that puts reductions in order; always 1, but TensorFlow cannot know."""
    import tensorflow as tf

    def make() -> Any:
        with tf.device("/CPU:0"):
            return tf.Variable(1, trainable=False, name="hvdkit_turn")

    # A thread of its own has no function under way, which would be traced again for its sake.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _gather_slices(
    slices: Any,
    name: str,
    *,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
) -> Any:
    """Concatenate the rows of all ranks; equal indices add up where the slices are applied."""
    values = scale(slices, prescale_factor * postscale_factor).values
    if op == hvd.Average:
        values = values / keras.ops.cast(hvd.size_op(process_set.process_set_id), values.dtype)
    # A scope has the number of the optimizer or the call, which depends on the process's past.
    options = {"process_set": process_set, "ignore_name_scope": True}
    values = hvd.allgather(values, name=f"HorovodAllgather.{name}.values", **options)
    indices = hvd.allgather(slices.indices, name=f"HorovodAllgather.{name}.indices", **options)
    return type(slices)(values, indices, slices.dense_shape)


def allgather_bytes(payload: bytes, *, name: str, process_set: Any) -> list[bytes]:
    """Gather one byte string from every rank, in the order of the ranks.

    Collective: every rank of ``process_set`` must call, with the same ``name``, outside of
    ``tf.function``.
    """
    lengths = _allgather(np.array([len(payload)], np.int64), f"{name}.lengths", process_set)
    data = _allgather(np.frombuffer(payload, np.uint8), f"{name}.data", process_set)
    ends = np.cumsum(lengths)
    return [data[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]


def broadcast_bytes(data: np.ndarray, root_rank: int, *, name: str, process_set: Any) -> np.ndarray:
    """Send the root's uint8 array to every rank.

    Collective: every rank of ``process_set`` must call, with arrays of the same length and the
    same ``name``, outside of ``tf.function``.
    """
    return np.asarray(
        hvd.broadcast(_to_tensor(data), root_rank, name=f"hvdkit.{name}", process_set=process_set)
    )


def sum_array(array: np.ndarray, *, name: str, process_set: Any) -> np.ndarray:
    """Return the sum of the ranks' arrays, taken on the CPU.

    Collective: every rank of ``process_set`` must call, with arrays of the same shape and dtype
    and the same ``name``, outside of ``tf.function``.
    """
    options = {"op": hvd.Sum, "name": f"hvdkit.{name}", "process_set": process_set}
    with trace.span("wait"):
        return np.asarray(hvd.allreduce(_to_tensor(array), **options))


def _allgather(array: np.ndarray, name: str, process_set: Any) -> np.ndarray:
    return np.asarray(hvd.allgather(_to_tensor(array), name=name, process_set=process_set))


def _to_tensor(array: np.ndarray) -> Any:
    if is_tensorflow():
        import tensorflow as tf

        return tf.convert_to_tensor(array)
    import torch

    return torch.from_numpy(array.copy())
