"""Collectives on plain values, as ``horovod.keras`` has them: NumPy arrays come back."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import hvd, is_tensorflow

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_global_variables", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
) -> Any:
    """Reduce a value over all ranks.

    Collective: every rank must call, with values of the same shape, outside of ``tf.function``.

    Args:
        value: A number, an array, or a tensor of the backend.
        name: The operation's name.
        average: Deprecated in Horovod, use ``op``.
        prescale_factor: The value is multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        op: The reduction; ``Average`` by default.
        compression: How the value travels.

    Returns:
        An array of the value's shape.
    """
    if average is not None and op is not None:
        raise ValueError("give op or average, not both")
    if op is None:
        op = hvd.Sum if average is False else hvd.Average
    options: dict[str, Any] = {
        "op": op,
        "compression": compression,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    return _to_numpy(hvd.allreduce(_to_tensor(value), name=name, **options))


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks along the first dimension, which may differ.

    Collective: every rank must call, outside of ``tf.function``.
    """
    return _to_numpy(hvd.allgather(_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root's value on every rank.

    Collective: every rank must call, with values of the same shape, outside of ``tf.function``.
    """
    return _to_numpy(hvd.broadcast(_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: Any = hvd.Average) -> Any:
    """Reduce a value over all ranks and return this rank's share of the first dimension.

    Collective: every rank must call, with values of the same shape, outside of ``tf.function``.
    """
    return _to_numpy(hvd.reducescatter(_to_tensor(value), name=name, op=op))


def broadcast_global_variables(root_rank: int) -> None:
    """Raise: TensorFlow 2 and Keras 3 keep no list of all variables.

    Raises:
        HvdkitError: Always; names what to use.
    """
    raise HvdkitError(
        "Keras 3 has no global variables; use broadcast_initial_state(model) or "
        "callbacks.BroadcastGlobalVariablesCallback(root_rank)"
    )


def _to_tensor(value: Any) -> Any:
    tensor = ops.convert_to_tensor(value)
    # Horovod takes no views with strides on PyTorch, such as those of a transposed array.
    return tensor if is_tensorflow() else tensor.detach().contiguous()


def _to_numpy(tensor: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(tensor))
