"""Bring the buffers of a model together, batch-norm statistics above all."""

from __future__ import annotations

import torch
from horovod.torch.mpi_ops import Max, ProcessSet, Sum, allreduce_, global_process_set

from hvdkit.torch.agreement import demand_equal_entries
from hvdkit.torch.transport import drop_repeats, pick_wire_device

__all__ = ["average_buffers"]


def average_buffers(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Average the floating-point buffers over all ranks, before evaluation or saving.

    In training every rank's batch norm keeps running means and variances of its own share.
    Counters (integer buffers of one element, such as ``num_batches_tracked``) become the
    largest of any rank; other integer buffers are left alone.

    The sum is taken in float64, so a buffer that was equal on all ranks keeps its bits. One
    all-reduce for all floating buffers, one for the counters.

    Collective: every rank of ``process_set`` must call.

    Args:
        model: Of the same buffers on every rank.
        process_set: The ranks to average over.

    Raises:
        RankDisagreementError: On every rank, if buffers differ in name, shape or dtype.
    """
    named = list(model.named_buffers())
    demand_equal_entries(
        "average_buffers: the buffers",
        [(name, f"{buffer.dtype} {tuple(buffer.shape)}") for name, buffer in named],
        name="average_buffers",
        process_set=process_set,
    )
    buffers = [drop_repeats(buffer) for _, buffer in named]
    real = [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
    floating = [b for b in real if b.is_floating_point() and b.numel()]
    counters = [b for b in real if not b.is_floating_point() and b.numel() == 1]
    counters = [b for b in counters if b.dtype != torch.bool]
    if floating:
        flat = _flatten(floating, torch.float64)
        allreduce_(flat, op=Sum, name="hvdkit.average_buffers.mean", process_set=process_set)
        _scatter(flat.div_(process_set.size()), floating)
    if counters:
        flat = _flatten(counters, torch.int64)
        allreduce_(flat, op=Max, name="hvdkit.average_buffers.max", process_set=process_set)
        _scatter(flat, counters)


def _flatten(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    device = pick_wire_device(tensors[0].device)
    return torch.cat([t.reshape(-1).to(device=device, dtype=dtype) for t in tensors])


def _scatter(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    parts = flat.split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
