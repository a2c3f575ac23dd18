"""``DistributedOptimizer``: any Keras 3 optimizer, its gradients reduced before the update."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hvdkit import agreement
from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import hvd, is_tensorflow, make_dense, scale, sum_array
from hvdkit.keras.collectives import gather_over
from hvdkit.keras.compilation import keep_out_of_xla
from hvdkit.keras.layout import is_elastic
from hvdkit.keras.loss_scale import agree_on_finite
from hvdkit.keras.reduction import DEFAULT_BUCKET_SIZE_MB, ReductionOptions, reduce_gradients

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "find_distribution"]

# Wrapped in the same order on every rank, so the count names the same optimizer on each.
_counter = itertools.count()


class _Distribution:
    """What makes one optimizer distributed; hangs on it as ``_hvdkit``."""

    def __init__(
        self,
        options: ReductionOptions,
        alone: bool,
        clip_grad_norm: float | None,
        passes_to_sum: int,
        scale_local_gradients: bool,
    ) -> None:
        self.options = options
        self.alone = alone
        self.clip_grad_norm = clip_grad_norm
        self.passes_to_sum = passes_to_sum
        self.scale_local_gradients = scale_local_gradients
        self.local_variables: list[Any] = []
        self.variables: list[Any] = []  # those of the update under way

    def is_local(self, variable: Any) -> bool:
        return any(variable is local for local in self.local_variables)

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients that the update takes."""
        results = list(gradients)
        shared = [
            index for index, variable in enumerate(self.variables) if not self.is_local(variable)
        ]
        if not self.alone and shared:
            reduced = reduce_gradients(
                [results[index] for index in shared],
                self.options,
                [self.variables[index] for index in shared],
            )
            for index, gradient in zip(shared, reduced, strict=True):
                results[index] = gradient
        if self.scale_local_gradients and not self.alone:
            ranks = self.options.process_set.size()
            for index in set(range(len(results))) - set(shared):
                results[index] = scale(results[index], 1 / ranks)
        if self.passes_to_sum > 1:
            results = [scale(gradient, self.passes_to_sum) for gradient in results]
        if self.clip_grad_norm is not None:
            results = _clip(results, self.clip_grad_norm)
        return results

    def fill_absent(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Replace None by zeros where another rank has a gradient.

        On TensorFlow a missing gradient is a property of the graph, the same on every rank; on
        PyTorch it depends on what the forward pass did.
        """
        results = list(gradients)
        if self.alone or is_tensorflow():
            return results
        process_set = self.options.process_set
        present = np.array([gradient is not None for gradient in results], np.int32)
        holders = sum_array(present, name=f"{self.options.name}.present", process_set=process_set)
        for index, variable in enumerate(variables):
            if results[index] is None and holders[index]:
                results[index] = ops.zeros(variable.shape, variable.dtype)
        return results


def find_distribution(optimizer: object) -> _Distribution | None:
    """Return what ``DistributedOptimizer`` hung on ``optimizer``, or on the one that it holds."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    distribution: _Distribution | None = getattr(inner, "_hvdkit", None)
    return distribution


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_size_mb: float = DEFAULT_BUCKET_SIZE_MB,
    clip_grad_norm: float | None = None,
) -> Any:
    """Make ``optimizer`` reduce gradients over all ranks before it updates.

    The optimizer itself is changed and returned: it keeps its class, state and configuration,
    and is saved as what it is. Gradients are reduced once for each update, whichever way leads
    to it: ``fit``, a custom ``train_step``, ``apply`` or ``apply_gradients``. Its own clipping,
    weight decay and moving averages act on reduced gradients.

    Collective: every rank must call, with equal arguments, in the same order.

    Args:
        optimizer: Any Keras 3 optimizer; for a ``LossScaleOptimizer`` a non-finite gradient
            on one rank skips the update on all.
        name: Prefix of the operations' names.
        device_dense: Horovod's option; operations run where their tensors are.
        device_sparse: As ``device_dense``.
        compression: ``hvd.Compression.none``, ``fp16``, or a class with ``compress`` and
            ``decompress``, which sees whole flat buckets.
        sparse_as_dense: Reduce ``IndexedSlices`` as dense tensors.
        gradient_predivide_factor: With ``Average``: divide by it before the sum and by the
            rest after. By default all of the division comes first, which cannot overflow.
        op: ``hvd.Average`` (the mean over ranks) or ``hvd.Sum``.
        backward_passes_per_step: Calls that accumulate before one reduction and update, by
            Keras's own ``gradient_accumulation_steps``; with it, a ``LearningRateSchedule``
            counts updates, not calls.
        average_aggregated_gradients: Take the mean over those passes, as Keras's own option
            does, and not their sum.
        num_groups: Deprecated in Horovod, use ``groups``.
        groups: How many buckets to make, or lists of the variables that share one, instead of
            buckets by size.
        process_set: The ranks to reduce over; others train on their own.
        scale_local_gradients: Divide gradients of variables given to ``register_local_var`` by
            the number of ranks.
        bucket_size_mb: Gradients are reduced in buckets of about this size in MiB.
        clip_grad_norm: Scale gradients to at most this 2-norm, taken over all variables after
            the reduction and so the same on every rank.

    Returns:
        ``optimizer``, with ``register_local_var(variable)`` beside its own methods.

    Raises:
        ValueError: An argument is out of range.
        RankDisagreementError: Ranks passed different optimizers or options.
        HvdkitError: ``hvd.init()`` was not called, or the optimizer is wrapped already.
    """
    if not hvd.is_initialized():
        raise HvdkitError("Horovod is not initialized; call hvd.init() before this")
    if num_groups and groups is None:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups
    alone = not process_set.included() or (process_set.size() == 1 and not is_elastic())
    prefix = f"hvdkit.{name or 'optimizer'}{next(_counter)}"

    def build() -> _Distribution:
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"expected a keras.optimizers.Optimizer, got {type(optimizer).__module__}."
                f"{type(optimizer).__qualname__}; for tf_keras set TF_USE_LEGACY_KERAS=1 and use "
                f"hvdkit.tensorflow.keras"
            )
        if find_distribution(optimizer) is not None:
            raise HvdkitError("this optimizer is wrapped already; wrap it once")
        options = ReductionOptions(
            name=prefix,
            op=op,
            process_set=process_set,
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            bucket_bytes=int(bucket_size_mb * (1 << 20)),
            sparse_as_dense=sparse_as_dense,
        )
        options.validate()
        if backward_passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}"
            )
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, not {clip_grad_norm}")
        several = getattr(getattr(optimizer, "inner_optimizer", optimizer), "optimizers", None)
        if several is not None and (clip_grad_norm is not None or backward_passes_per_step > 1):
            raise ValueError(
                "clip_grad_norm and backward_passes_per_step do not go with several optimizers "
                "in one; set global_clipnorm and gradient_accumulation_steps on each of them"
            )
        return _Distribution(
            options,
            alone,
            clip_grad_norm,
            1 if average_aggregated_gradients else backward_passes_per_step,
            scale_local_gradients,
        )

    if alone or is_elastic():
        # In an elastic job ranks come and go, and who joins wraps alone.
        distribution = build()
    else:
        gather, ranks = gather_over(process_set), process_set.ranks
        with agreement.share_errors(f"{prefix}.arguments", gather=gather, ranks=ranks):
            distribution = build()
        agreement.demand_equal_entries(
            "The optimizer",
            [
                ("class", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"),
                *distribution.options.describe(),
                ("backward_passes_per_step", str(backward_passes_per_step)),
                ("average_aggregated_gradients", str(average_aggregated_gradients)),
                ("clip_grad_norm", str(clip_grad_norm)),
            ],
            name=f"{prefix}.agreement",
            gather=gather,
            ranks=ranks,
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    _attach(inner, distribution)
    if hasattr(inner, "optimizers"):
        _attach_to_each(inner, distribution)
    if backward_passes_per_step > 1:
        _accumulate(inner, backward_passes_per_step)
        _count_updates(inner)
    keep_out_of_xla(find_distribution)
    agree_on_finite()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    groups: int | list[list[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Like ``DistributedOptimizer``, but the variables of ``local_layers`` stay local to a rank.

    Collective: every rank must call.

    Args:
        optimizer: As for ``DistributedOptimizer``, as are all others; further ones by name.
        local_layers: A layer or a list of layers, built already.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else local_layers or []
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError("local_layers must be keras.layers.Layer objects")
    wrapped = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **options,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped


def _attach(optimizer: Any, distribution: _Distribution) -> None:
    """Bind the reduction to the one object, so that its class and configuration stay plain."""
    inner = type(optimizer)

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        self._hvdkit.variables = list(trainable_variables)
        return inner._backend_apply_gradients(self, grads, trainable_variables)

    # Every update passes here once, with accumulated gradients if Keras accumulates, before
    # clipping and weight decay.
    def _clip_gradients(self: Any, grads: Any) -> Any:
        return inner._clip_gradients(self, self._hvdkit.reduce(grads))

    def _filter_empty_gradients(self: Any, grads: Any, variables: Any) -> Any:
        grads = self._hvdkit.fill_absent(grads, variables)
        return inner._filter_empty_gradients(self, grads, variables)

    def register_local_var(self: Any, var: Any) -> None:
        self._hvdkit.local_variables.append(var)

    # Not the optimizer's own __setattr__, which tracks what it is given as state to save.
    for method in (
        _backend_apply_gradients,
        _clip_gradients,
        _filter_empty_gradients,
        register_local_var,
    ):
        object.__setattr__(optimizer, method.__name__, types.MethodType(method, optimizer))
    object.__setattr__(optimizer, "_hvdkit", distribution)


def _attach_to_each(optimizer: Any, distribution: _Distribution) -> None:
    """Let each optimizer in a ``MultiOptimizer`` reduce: it hands the gradients on to them."""

    def attach_all(self: Any) -> None:
        for index, one in enumerate(self.optimizers):
            if find_distribution(one) is None:
                own = copy.copy(distribution)  # the local variables remain shared
                name = f"{distribution.options.name}.{index}"
                own.options = dataclasses.replace(distribution.options, name=name)
                _attach(one, own)

    def build(self: Any, var_list: Any) -> None:
        type(self).build(self, var_list)
        attach_all(self)  # some are made here, by the variables

    attach_all(optimizer)
    object.__setattr__(optimizer, "build", types.MethodType(build, optimizer))


def _accumulate(optimizer: Any, passes: int) -> None:
    if optimizer.gradient_accumulation_steps == passes:
        return  # wrapped with the same number before it was saved or copied
    if optimizer.gradient_accumulation_steps:
        raise HvdkitError(
            f"the optimizer accumulates over {optimizer.gradient_accumulation_steps} passes "
            f"already (gradient_accumulation_steps), and not over {passes}; set either"
        )
    if optimizer.built:
        raise HvdkitError(
            "backward_passes_per_step needs an optimizer that is not built yet: wrap it before "
            "the first step, or create it with gradient_accumulation_steps"
        )
    optimizer.gradient_accumulation_steps = passes


def _count_updates(optimizer: Any) -> None:
    """Let a schedule count updates; Keras's own accumulation lets it count calls."""
    inner = type(optimizer)

    def _get_current_learning_rate(self: Any) -> Any:
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return self._learning_rate(self.iterations)
        return inner._get_current_learning_rate(self)

    method = types.MethodType(_get_current_learning_rate, optimizer)
    object.__setattr__(optimizer, "_get_current_learning_rate", method)


def _clip(gradients: list[Any], limit: float) -> list[Any]:
    dense = [make_dense(gradient) for gradient in gradients]
    squares = [ops.sum(ops.square(ops.cast(gradient, "float32"))) for gradient in dense]
    norm = ops.sqrt(sum(squares[1:], squares[0]))
    factor = ops.minimum(limit / (norm + 1e-6), 1.0)
    return [
        scale(gradient, ops.cast(factor, keras.backend.standardize_dtype(gradient.dtype)))
        for gradient in gradients
    ]
