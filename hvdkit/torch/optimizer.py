"""``DistributedOptimizer``: any PyTorch optimizer, its gradients reduced before the update."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import (
    Adasum,
    Average,
    ProcessSet,
    global_process_set,
    is_initialized,
)

from hvdkit import agreement
from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError
from hvdkit.settings import pick_bucket_bytes
from hvdkit.torch.adasum import demand_adasum
from hvdkit.torch.agreement import demand_equal_entries
from hvdkit.torch.amp import reduce_before_unscaling
from hvdkit.torch.collectives import share_errors
from hvdkit.torch.hyper_parameters import describe_hyper_parameters
from hvdkit.torch.optimizer_class import is_distributed, prepend_class
from hvdkit.torch.parameters import describe_parameters, name_parameters
from hvdkit.torch.plan import ReductionOptions
from hvdkit.torch.reducer import GradientReducer
from hvdkit.torch.wire import Compression

__all__ = ["DistributedOptimizer"]


# Wrapped in the same order on every rank, so the count names the same optimizer on each.
_counter = itertools.count()


def _describe_live(reference: Any) -> list[tuple[str, str]]:
    """List the hyper-parameters of an optimizer that is weakly held."""
    optimizer = reference()
    return [] if optimizer is None else describe_hyper_parameters(optimizer)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_size_mb: float | None = None,
    clip_grad_norm: float | None = None,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Make ``optimizer`` reduce gradients over all ranks before it updates.

    The optimizer itself is changed and returned: it stays an instance of its class, with its
    state, parameter groups, hooks and schedulers. Gradients are reduced while the backward
    pass runs; when ``backward()`` of the last pass of a window returns they are final, so
    clipping, ``torch.amp.GradScaler`` and plain reads work as with one process.

    Collective: every rank must call, with equal arguments, in the same order.

    Args:
        optimizer: Any ``torch.optim.Optimizer``, of torch or your own.
        named_parameters: Usually ``model.named_parameters()``; names appear in errors and
            must be equal on all ranks. All parameters of the optimizer must be named.
        compression: ``Compression.none``, ``fp16``, ``bf16``, or a class with ``compress``
            and ``decompress``, which sees whole buckets.
        backward_passes_per_step: Backward passes that accumulate before one reduction. Their
            gradients add up unless ``average_aggregated_gradients`` is set. ``step()`` before
            the last of them reduces what there is.
        op: ``Average`` (the mean over ranks), ``Sum`` or ``Adasum``.
        gradient_predivide_factor: With ``Average``: divide by it before the sum and by the
            rest after. By default all of the division comes first, which cannot overflow.
        num_groups: Deprecated in Horovod, use ``groups``.
        groups: How many buckets to make, or a list of lists of parameters that share one;
            instead of buckets by size.
        sparse_as_dense: Reduce sparse gradients in the dense buckets.
        process_set: The ranks to reduce over; others train on their own.
        bucket_size_mb: Gradients share flat buffers (buckets) that are closed at this size in
            MiB; the first one at 1 MiB, so that communication starts early. A gradient of half
            the size or more is reduced alone, where it lies. None: what
            ``hvdkit bench allreduce --write-config`` has saved on this machine, else 8.
        clip_grad_norm: Scale gradients to at most this 2-norm, taken over all parameters
            after the reduction and so the same on every rank.
        average_aggregated_gradients: Divide by the passes made, so that k passes equal one
            over k times the batch.

    Returns:
        ``optimizer``, with ``synchronize()``, ``skip_synchronize()``, ``no_sync()`` and
        ``set_backward_passes_per_step()`` beside its own methods.

    Raises:
        ValueError: An argument is out of range or parameters are named wrongly.
        RankDisagreementError: Ranks passed different optimizers, parameters or options.
        HvdkitError: ``hvd.init()`` was not called, or the optimizer is wrapped already.
    """
    if not is_initialized():
        raise HvdkitError("Horovod is not initialized; call hvd.init() before this")
    if num_groups and groups is None:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups
    elastic = is_elastic()
    included = process_set.included()
    alone = not included or (process_set.size() == 1 and not elastic)
    inner: Any = type(optimizer)
    name = f"hvdkit.optimizer{next(_counter)}"

    def build() -> tuple[ReductionOptions, list[tuple[str, torch.nn.Parameter]]]:
        if is_distributed(optimizer):
            raise HvdkitError("this optimizer is wrapped already; wrap it once")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the "
                "optimizer, not the model or its parameters"
            )
        options = ReductionOptions(
            op=op,
            process_set=process_set,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups,
            bucket_bytes=pick_bucket_bytes(bucket_size_mb),
            sparse_as_dense=sparse_as_dense,
            sparse_only=isinstance(optimizer, torch.optim.SparseAdam),
        )
        options.validate()
        if op == Adasum and not alone:
            demand_adasum()
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, not {clip_grad_norm}")
        return options, name_parameters(optimizer, named_parameters)

    def describe_wrapping() -> list[tuple[str, str]]:
        return [
            *agreement.describe_versions({"PyTorch": torch.__version__}),
            ("class", f"{inner.__module__}.{inner.__qualname__}"),
            *options.describe(named),
            ("clip_grad_norm", str(clip_grad_norm)),
            ("number of parameters", str(len(named))),
            ("number of parameter groups", str(len(optimizer.param_groups))),
        ]

    if alone or elastic:
        # In an elastic job ranks come and go, and who joins wraps alone; they compare when
        # they first reduce together.
        options, named = build()
    else:
        with share_errors(f"{name}.arguments", process_set):
            options, named = build()
        demand_equal_entries(
            "The optimizer",
            [*describe_wrapping(), *describe_parameters(named)],
            name=f"{name}.agreement",
            process_set=process_set,
        )
    # Hyper-parameters may differ until rank 0 has broadcast those of a checkpoint.
    reference = weakref.ref(optimizer)
    wrapping = describe_wrapping() if elastic else []
    options.describe_optimizer = lambda: [*wrapping, *_describe_live(reference)]
    # Adasum reduces updates in step(); there is nothing to do in the backward pass.
    reducer = GradientReducer(options, name, alone=alone or op == Adasum)
    prepend_class(
        optimizer,
        reducer,
        {id(param): name for name, param in named},
        combines_updates=op == Adasum and not alone,
        clip_grad_norm=clip_grad_norm,
    )
    reduce_before_unscaling(is_distributed)
    return optimizer
