"""Tensors of any dtype as bytes: what broadcasts and gathers without arithmetic need.

Horovod 0.28.1 has no bfloat16, complex or 8-bit floating types, and one operation per tensor is
slow. As bytes all tensors look alike and travel together, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from horovod.torch.mpi_ops import (
    ProcessSet,
    broadcast_,
    cuda_built,
    global_process_set,
    rocm_built,
)

CHUNK_BYTES = 128 * 2**20

__all__ = ["broadcast_tensors", "drop_repeats", "pick_wire_device", "view_bytes"]


def pick_wire_device(device: torch.device) -> torch.device:
    """Return where a tensor must lie for Horovod to take it: its own device or the CPU.

    A Horovod built without GPU support accepts GPU tensors too, but starts to copy them to the
    CPU and does not wait for the copy. Copying them here does.
    """
    if device.type == "cuda" and (cuda_built() or rocm_built()):
        return device
    return torch.device("cpu")


def view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a flat uint8 tensor: a view where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite tensors on every rank with the bits that they have on the root.

    The root only reads. All tensors of a device travel in one broadcast; above 128 MiB in
    several, so that the copy on the way stays small beside the model.

    Collective: every rank of ``process_set`` must call, with the same ``name`` and with
    tensors of the same shapes, dtypes and order.
    """
    by_kind: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault(pick_wire_device(tensor.device).type, []).append(tensor)
    # Ranks may number their devices differently; the kind is what they share.
    for kind in sorted(by_kind):
        _broadcast_chunks(by_kind[kind], root_rank, f"hvdkit.{name}", process_set)


def _broadcast_chunks(
    tensors: list[torch.Tensor], root_rank: int, name: str, process_set: ProcessSet
) -> None:
    is_root = process_set.ranks[process_set.rank()] == root_rank
    targets = [drop_repeats(tensor) for tensor in tensors]
    total_bytes = sum(target.numel() * target.element_size() for target in targets)
    device = pick_wire_device(targets[0].device)
    chunk = torch.empty(min(total_bytes, CHUNK_BYTES), dtype=torch.uint8, device=device)
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []  # some bytes of a tensor, their place
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # a finished tensor, all its bytes
    filled = 0

    def send() -> None:
        nonlocal filled
        if is_root:
            for data, place in pieces:
                place.copy_(data)
        broadcast_(chunk[:filled], root_rank, name=name, process_set=process_set)
        if not is_root:
            for data, place in pieces:
                data.copy_(place)
            for target, data in copies:
                target.copy_(data.view(target.dtype).view(target.shape))
        pieces.clear()
        copies.clear()
        filled = 0

    for target in targets:
        data = view_bytes(target)
        start = 0
        while start < data.numel():
            if filled == CHUNK_BYTES:
                send()
            end = start + min(data.numel() - start, CHUNK_BYTES - filled)
            pieces.append((data[start:end], chunk[filled : filled + end - start]))
            filled += end - start
            start = end
        if data.data_ptr() != target.data_ptr():
            copies.append((target, data))  # not contiguous: its bytes are a copy
    if filled:
        send()


def drop_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Keep one of each element that ``expand`` shows several times, so that it can be written."""
    plain = tensor.detach()
    for dim, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
        if stride == 0 and size > 1:
            plain = plain.narrow(dim, 0, 1)
    return plain
