"""Batch normalization whose statistics are those of all ranks' batches together."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import global_process_set, rank_op, size, size_op

from hvdkit.env import is_elastic
from hvdkit.tensorflow.keras import allreduce_tensors

__all__ = ["SyncBatchNormalization"]

# Layers are made in the same order on every rank, so the count names the same layer on each.
_counter = itertools.count()


@keras.saving.register_keras_serializable(package="hvdkit")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc, unused-ignore]
    """``keras.layers.BatchNormalization`` over all ranks in training.

    Output, gradients and moving statistics are those of one process on the ranks' batches
    concatenated. Ranks may have batches of different sizes, and masks. One small all-reduce in
    the forward pass and one in the backward pass; none in inference. Horovod's own layer is one
    of Keras 2, which Keras 3 cannot construct.

    Collective in training: every rank must run it, forward and backward.

    Args:
        fused: Horovod's option; False.
        kwargs: As for ``keras.layers.BatchNormalization``.

    Source: Ioffe and Szegedy, Batch Normalization (2015); the variances of the ranks combine
    as in Chan, Golub and LeVeque, Updating Formulae for Computing Sample Variances (1979).
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA has no Horovod operations
        self._operation_name = f"hvdkit.sync_batch_norm{next(_counter)}"

    @tf.autograph.experimental.do_not_convert
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if size() == 1 and not is_elastic():
            moments: tuple[Any, Any] = super()._moments(inputs, mask)
            return moments
        axes = self._reduction_axes
        channels = inputs.shape[self.axis]
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        count = tf.reduce_sum(weights, axes, keepdims=True)
        mean = tf.math.divide_no_nan(tf.reduce_sum(weights * inputs, axes, keepdims=True), count)
        squares = tf.reduce_sum(weights * (inputs - mean) ** 2, axes)
        local = tf.stack([tf.reshape(part, [channels]) for part in (count, mean, squares)])
        counts, means, squares = tf.unstack(_gather(local, self._operation_name), axis=1)
        total = tf.reduce_sum(counts, 0)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
        between = tf.reduce_sum(counts * (means - mean) ** 2, 0)
        return mean, tf.math.divide_no_nan(tf.reduce_sum(squares, 0) + between, total)


def _gather(local: Any, name: str) -> Any:
    """Stack a tensor of every rank along a new first dimension; has a gradient."""
    if not tf.executing_eagerly():
        # A layer that is called twice reduces twice, maybe at the same time.
        name = tf.compat.v1.get_default_graph().unique_name(name)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def gather(local: Any) -> Any:
        place = tf.reshape(rank_op(), [1, 1])
        shape = tf.concat([[size_op()], tf.shape(local)], 0)
        table = tf.ensure_shape(
            tf.scatter_nd(place, local[tf.newaxis], shape), [None, *local.shape]
        )
        [everyones] = allreduce_tensors([table], [name], process_set=global_process_set)

        def differentiate(upstream: Any) -> Any:
            [total] = allreduce_tensors(
                [upstream], [f"{name}.gradient"], process_set=global_process_set
            )
            return tf.gather(total, place[0, 0])

        return everyones, differentiate

    return gather(local)
