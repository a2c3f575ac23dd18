"""``DistributedOptimizer``: any Keras 3 optimizer, its gradients reduced before the update."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import keras

from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import hvd
from hvdkit.keras.collectives import share_errors
from hvdkit.keras.compilation import keep_out_of_xla
from hvdkit.keras.distribution import Distribution, attach, find_distribution, find_held
from hvdkit.keras.layout import list_versions
from hvdkit.keras.loss_scale import agree_on_finite
from hvdkit.keras.reduction import ReductionOptions
from hvdkit.keras.steering import steer_alike
from hvdkit.settings import pick_bucket_bytes

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]

# Wrapped in the same order on every rank, so the count names the same optimizer on each.
_counter = itertools.count()


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
    bucket_size_mb: float | None = None,
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
        bucket_size_mb: Gradients are reduced in buckets of about this size in MiB. None: what
            ``hvdkit bench allreduce --write-config`` has saved on this machine, else 8.
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

    def build() -> Distribution:
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
            bucket_bytes=pick_bucket_bytes(bucket_size_mb),
            sparse_as_dense=sparse_as_dense,
        )
        options.validate()
        if backward_passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}"
            )
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, not {clip_grad_norm}")
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        several = hasattr(inner, "optimizers") or find_held(inner)
        if several and (clip_grad_norm is not None or backward_passes_per_step > 1):
            raise ValueError(
                "clip_grad_norm and backward_passes_per_step do not go with several optimizers "
                "in one; set global_clipnorm and gradient_accumulation_steps on each of them"
            )
        return Distribution(
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
        with share_errors(f"{prefix}.arguments", process_set):
            distribution = build()
        demand_equal_entries(
            "The optimizer",
            [
                *list_versions(),
                ("class", f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"),
                *distribution.options.describe(),
                ("backward_passes_per_step", str(backward_passes_per_step)),
                ("average_aggregated_gradients", str(average_aggregated_gradients)),
                ("clip_grad_norm", str(clip_grad_norm)),
            ],
            name=f"{prefix}.agreement",
            process_set=process_set,
        )
    attach(optimizer, distribution, backward_passes_per_step)
    keep_out_of_xla()
    agree_on_finite(find_distribution)
    steer_alike()
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
