"""Adasum: ranks combine their updates, not their gradients.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from horovod.torch.mpi_ops import (
    Adasum,
    grouped_allreduce_async_,
    mpi_enabled,
    nccl_built,
    size,
    synchronize,
)

from hvdkit.errors import HvdkitError

__all__ = ["combine_updates", "demand_adasum"]


def demand_adasum() -> None:
    """Raise HvdkitError unless this Horovod, with this many ranks, can do Adasum."""
    if not (mpi_enabled() or nccl_built()):
        raise HvdkitError(
            "op=Adasum needs Horovod built with MPI and started through it; run `hvdkit install "
            "--with-mpi`, or use op=Average"
        )
    if size() & (size() - 1):
        raise HvdkitError(f"op=Adasum needs a power of two ranks, not {size()}")


@torch.no_grad()
def combine_updates(optimizer: Any, update: Callable[[], Any], name: str) -> Any:
    """Run ``update`` and replace what it changed by the Adasum of all ranks' changes.

    Collective: every rank must call.

    Args:
        optimizer: Its trainable parameters are combined, one coefficient for each parameter.
        update: The local step.
        name: The operation's name, the same on every rank.

    Returns:
        What ``update`` returned.
    """
    params = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ]
    before = [param.detach().clone() for param in params]
    result = update()
    changes = [_reducible(param - old) for param, old in zip(params, before, strict=True)]
    if changes:
        handle = grouped_allreduce_async_(changes, name=name, op=Adasum)
        for param, old, change in zip(params, before, synchronize(handle), strict=True):
            param.copy_(old).add_(change)
    return result


def _reducible(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor.contiguous()
