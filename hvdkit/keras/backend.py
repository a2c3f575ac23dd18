"""Horovod on the backend that Keras runs on, TensorFlow or PyTorch.

Whatever differs between the two is here; the rest of the adapter speaks ``keras.ops`` and NumPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.errors import HvdkitError

__all__ = [
    "allgather_bytes",
    "allreduce_tensors",
    "broadcast_bytes",
    "hvd",
    "is_sparse",
    "is_tensorflow",
    "make_dense",
    "sum_array",
]

_HOROVOD = {"tensorflow": "horovod.tensorflow", "torch": "horovod.torch"}

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


def make_dense(gradient: Any) -> Any:
    """Return ``IndexedSlices`` as a tensor, equal indices added up; other gradients as they are."""
    if not is_sparse(gradient):
        return gradient
    # Not keras.ops.convert_to_tensor, which leaves them sparse.
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def allreduce_tensors(
    tensors: Sequence[Any],
    names: Sequence[str],
    *,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
) -> list[Any]:
    """Sum tensors over the ranks, all at the same time; works inside ``tf.function``.

    Collective: every rank of ``process_set`` must call, with tensors of equal shapes and dtypes.

    Args:
        tensors: Tensors of the backend; on TensorFlow ``IndexedSlices`` too, which are gathered.
        names: One name a tensor, equal on all ranks.
        prescale_factor: Each local tensor is multiplied by it before the sum.
        postscale_factor: The sum is multiplied by it.
        process_set: The ranks to reduce over.
    """
    options = {
        "op": hvd.Sum,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    pairs = zip(tensors, names, strict=True)
    if is_tensorflow():
        return [
            _gather_slices(tensor, name, prescale_factor * postscale_factor, process_set)
            if is_sparse(tensor)
            else hvd.allreduce(tensor, name=name, **options)
            for tensor, name in pairs
        ]
    handles = [hvd.allreduce_async(tensor, name=name, **options) for tensor, name in pairs]
    return [hvd.synchronize(handle) for handle in handles]


def _gather_slices(slices: Any, name: str, factor: float, process_set: Any) -> Any:
    """Concatenate the rows of all ranks; equal indices add up where the slices are applied."""
    values = hvd.allgather(slices.values * factor, name=f"{name}.values", process_set=process_set)
    indices = hvd.allgather(slices.indices, name=f"{name}.indices", process_set=process_set)
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
    return np.asarray(
        hvd.allreduce(_to_tensor(array), op=hvd.Sum, name=f"hvdkit.{name}", process_set=process_set)
    )


def _allgather(array: np.ndarray, name: str, process_set: Any) -> np.ndarray:
    return np.asarray(hvd.allgather(_to_tensor(array), name=name, process_set=process_set))


def _to_tensor(array: np.ndarray) -> Any:
    if is_tensorflow():
        import tensorflow as tf

        return tf.convert_to_tensor(array)
    import torch

    return torch.from_numpy(array.copy())
