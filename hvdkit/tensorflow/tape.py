"""``DistributedGradientTape``: gradients of a tape, reduced over all ranks."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as tf

from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError
from hvdkit.settings import pick_bucket_bytes
from hvdkit.tensorflow.keras import (
    ReductionOptions,
    reduce_gradients,
    scale,
)

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed:
    """What a wrapped tape's class has in front of its own."""

    _options: ReductionOptions
    _scale_local_gradients: bool
    _local_sources: list[Any]
    _paused: bool

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a variable local to this rank."""
        self._local_sources.append(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return what ``tf.GradientTape.gradient`` returns, reduced over all ranks.

        Collective: every rank must call, with sources of the same shapes and dtypes.

        Raises:
            RankDisagreementError: On every rank, when they first meet gradients that are not
                the same kind on each.

        Args:
            target: As for ``tf.GradientTape.gradient``, as are the others.
            sources: One variable or a nest of them, of Keras or TensorFlow.
            output_gradients: Gradients of the target's elements.
            use_generic_names: Without effect: names never depend on the graph. In this place
                TensorFlow has ``unconnected_gradients``, which is taken too.
            unconnected_gradients: What is returned for a source that the target does not
                depend on.
        """
        if not isinstance(use_generic_names, bool):
            unconnected_gradients = use_generic_names
        gradients = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        if self._paused:
            return gradients
        flat = tf.nest.flatten(gradients)
        shaped = [
            None if gradient is None else _with_shape(gradient, source)
            for gradient, source in zip(flat, tf.nest.flatten(sources), strict=True)
        ]
        return tf.nest.pack_sequence_as(gradients, self._reduce(shaped, sources))

    @tf.autograph.experimental.do_not_convert
    def jacobian(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``tf.GradientTape.jacobian`` returns, reduced over all ranks.

        Collective: every rank must call, with targets and sources of the same shapes.
        """
        with self._pause():
            jacobians = super().jacobian(target, sources, *args, **kwargs)  # type: ignore[misc]
        results = self._reduce(tf.nest.flatten(jacobians), sources)
        return tf.nest.pack_sequence_as(jacobians, results)

    @tf.autograph.experimental.do_not_convert
    def batch_jacobian(self, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what ``tf.GradientTape.batch_jacobian`` returns, of this rank's examples."""
        with self._pause():
            return super().batch_jacobian(target, source, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _pause(self) -> Any:
        """Leave the gradients local of which TensorFlow composes something else."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _reduce(self, gradients: list[Any], sources: Any) -> list[Any]:
        results = list(gradients)
        listed = tf.nest.flatten(sources)
        local = [
            index
            for index, source in enumerate(listed)
            if results[index] is not None and self._is_local(source)
        ]
        shared = [
            index
            for index, gradient in enumerate(results)
            if gradient is not None and index not in local
        ]
        process_set = self._options.process_set
        if process_set.included() and (process_set.size() > 1 or is_elastic()):
            reduced = reduce_gradients(
                [results[index] for index in shared],
                self._options,
                [listed[index] for index in shared],
            )
            for index, gradient in zip(shared, reduced, strict=True):
                results[index] = gradient
            if self._scale_local_gradients:
                for index in local:
                    results[index] = scale(results[index], 1 / process_set.size())
        return results

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) pairs of local sources, and of all others.

        Collective: every rank must call; see ``gradient``.
        """
        gradients = self.gradient(target, sources, output_gradients)
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for source, gradient in zip(sources, gradients, strict=True):
            (local if self._is_local(source) else shared).append((source, gradient))
        return local, shared

    def _is_local(self, source: Any) -> bool:
        return any(source is local for local in self._local_sources)


@functools.cache
def _distributed_class(inner: Any) -> type:
    return type(inner.__name__, (_Distributed, inner), {"__doc__": inner.__doc__})


def _with_shape(gradient: Any, source: Any) -> Any:
    """Give a gradient its variable's shape where tracing has lost it."""
    known = gradient.shape.is_fully_defined() or isinstance(gradient, tf.IndexedSlices)
    return gradient if known else tf.ensure_shape(gradient, source.shape)


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = _horovod.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = _horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = _horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_size_mb: float | None = None,
) -> Any:
    """Make ``gradtape.gradient`` return gradients that are reduced over all ranks.

    The tape itself is changed and returned. Dense gradients of one dtype travel in a few large
    buckets; ``IndexedSlices`` are gathered; None stays None. Works inside ``tf.function``, where
    buckets travel while the rest of the backward pass runs.

    Args:
        gradtape: A ``tf.GradientTape``, inside or after its ``with`` block.
        device_dense: Horovod's option; operations run where their tensors are.
        device_sparse: As ``device_dense``.
        compression: ``Compression.none``, ``fp16``, or a class with ``compress`` and
            ``decompress``, which sees whole flat buckets.
        sparse_as_dense: Reduce ``IndexedSlices`` as dense tensors.
        op: ``Average`` (the mean over ranks) or ``Sum``.
        gradient_predivide_factor: With ``Average``: divide by it before the sum and by the
            rest after.
        num_groups: Deprecated in Horovod, use ``groups``.
        groups: How many buckets to make, or lists of the variables that share one, instead of
            buckets by size.
        process_set: The ranks to reduce over.
        scale_local_gradients: Divide gradients of local sources by the number of ranks.
        bucket_size_mb: Gradients are reduced in buckets of about this size in MiB. None: what
            ``hvdkit bench allreduce --write-config`` has saved on this machine, else 8.

    Returns:
        ``gradtape``.

    Raises:
        ValueError: An argument is out of range.
        HvdkitError: ``hvd.init()`` was not called, or the tape is wrapped already.
    """
    if not _horovod.is_initialized():
        raise HvdkitError("Horovod is not initialized; call hvd.init() before this")
    if isinstance(gradtape, _Distributed):
        raise HvdkitError("this tape is wrapped already; wrap it once")
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"expected a tf.GradientTape, got {type(gradtape).__name__}")
    if num_groups and groups is None:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups
    options = ReductionOptions(
        name="hvdkit.tape",
        op=op,
        process_set=process_set,
        compression=compression,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        bucket_bytes=pick_bucket_bytes(bucket_size_mb),
        sparse_as_dense=sparse_as_dense,
    )
    options.validate()
    wrapped: Any = gradtape
    inner: Any = type(gradtape)
    wrapped.__class__ = _distributed_class(inner)
    wrapped._options = options
    wrapped._scale_local_gradients = scale_local_gradients
    wrapped._local_sources = []
    wrapped._paused = False
    return wrapped


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = _horovod.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = _horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = _horovod.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    bucket_size_mb: float | None = None,
) -> Any:
    """Like ``DistributedGradientTape``, but variables of ``local_layers`` stay local to a rank.

    Args:
        gradtape: As for ``DistributedGradientTape``, as are the further arguments.
        local_layers: A layer or a list of layers, built already.
    """
    layers = [local_layers] if hasattr(local_layers, "trainable_weights") else local_layers or []
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise ValueError("local_layers must be Keras layers")
    wrapped = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        bucket_size_mb=bucket_size_mb,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_source(variable)
    return wrapped
