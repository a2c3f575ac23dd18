"""``DistributedOptimizer`` for whatever optimizer a TensorFlow program has."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as _horovod
import keras
import tensorflow as tf

from hvdkit.tensorflow.keras import distribute_keras_3
from hvdkit.tensorflow.legacy_keras import DistributedOptimizer as _distribute_tf_keras

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = _horovod.Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = _horovod.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = _horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_size_mb: float | None = None,
    clip_grad_norm: float | None = None,
) -> Any:
    """Make an optimizer reduce gradients over all ranks before it updates.

    A Keras 3 optimizer becomes one of ``hvdkit.keras.DistributedOptimizer``, which says what the
    arguments mean. Optimizers of ``tf.compat.v1`` and of ``tf_keras`` take Horovod's own path,
    which has neither ``bucket_size_mb`` nor ``clip_grad_norm``.

    Collective: every rank must call, with equal arguments, in the same order.

    Args:
        use_locking: For optimizers of ``tf.compat.v1``.

    Raises:
        ValueError: An argument is out of range, or is not known for this kind of optimizer.
        RankDisagreementError: Ranks passed different optimizers or options.
    """
    shared: dict[str, Any] = {
        "name": name,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return distribute_keras_3(
            optimizer, **shared, bucket_size_mb=bucket_size_mb, clip_grad_norm=clip_grad_norm
        )
    if clip_grad_norm is not None or bucket_size_mb is not None:
        raise ValueError(
            f"clip_grad_norm and bucket_size_mb need a Keras 3 optimizer; "
            f"{type(optimizer).__name__} is none"
        )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _horovod.DistributedOptimizer(optimizer, use_locking=use_locking, **shared)
    if gradient_predivide_factor != 1.0 and op != _horovod.Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    # Not by Horovod's function of this name, which drops op and groups on the way to Keras.
    return _distribute_tf_keras(optimizer, **shared)
