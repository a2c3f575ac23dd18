"""Prove that all ranks hold the same model."""

from __future__ import annotations

import hashlib

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvdkit.errors import HvdkitError, ReplicaMismatchError
from hvdkit.torch.agreement import find_difference
from hvdkit.torch.transport import view_bytes

__all__ = ["check_replicas"]


def check_replicas(
    model: torch.nn.Module,
    buffers: bool = False,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise unless every rank holds the same parameters, to the last bit.

    Compares a digest of each tensor, so hardly anything travels; every tensor is read once.

    Collective: every rank of ``process_set`` must call.

    Args:
        model: The replica of this rank.
        buffers: Compare the buffers as well. Batch-norm statistics are local to a rank in
            training and differ until ``average_buffers``.
        process_set: The ranks to compare.

    Raises:
        ReplicaMismatchError: On every rank; names the first parameter that differs and the
            ranks that hold each version of it.
    """
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    entries: list[tuple[str, str]] | HvdkitError
    try:
        entries = [(name, _describe(name, tensor)) for name, tensor in named]
    except HvdkitError as error:
        entries = error
    difference = find_difference(entries, name="check_replicas", process_set=process_set)
    if difference is not None:
        raise ReplicaMismatchError(
            f"replicas differ, first at {difference}; broadcast_initial_state makes them equal"
        )


def _describe(name: str, tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor) or tensor.device.type == "meta":
        raise HvdkitError(f"{name!r} has no data to compare; run one forward pass first")
    if tensor.layout is not torch.strided:
        raise HvdkitError(f"{name!r} has layout {tensor.layout}; only dense tensors are compared")
    data = view_bytes(tensor).cpu().numpy().data
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} digest {digest}"
