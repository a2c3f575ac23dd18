"""Small collectives over Python objects, and errors that reach every rank.

Horovod names an operation without a name after a running count of the operations of its own
rank, so ranks that did a different number of things before no longer match. Every operation
here takes an explicit name. One name serves any number of calls one after another.
"""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import torch
from horovod.torch.mpi_ops import ProcessSet, allgather, global_process_set

from hvdkit import agreement
from hvdkit.agreement import Gather

_LENGTH_BYTES = 8

__all__ = [
    "allgather_object",
    "broadcast_object",
    "gather_over",
    "share_errors",
]


def allgather_object(
    obj: Any, *, name: str, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather one picklable object from every rank.

    Collective: every rank of ``process_set`` must call, with the same ``name``.

    Returns:
        The objects, in the order of the ranks within ``process_set``.
    """
    payload = cloudpickle.dumps(obj)
    return [pickle.loads(part) for part in _allgather_bytes(payload, name, process_set)]


def broadcast_object(
    obj: Any, root_rank: int = 0, *, name: str, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the picklable object of ``root_rank`` to every rank; the root gets its own back.

    Collective: every rank of ``process_set`` must call, with the same ``name``.

    Args:
        root_rank: A global rank that is in ``process_set``.
    """
    root = process_set.ranks.index(root_rank)
    is_root = process_set.rank() == root
    parts = _allgather_bytes(cloudpickle.dumps(obj) if is_root else b"", name, process_set)
    return obj if is_root else pickle.loads(parts[root])


def gather_over(process_set: ProcessSet) -> Gather:
    """Return ``allgather_object`` as ``hvdkit.agreement`` wants it."""
    return lambda obj, name: allgather_object(obj, name=name, process_set=process_set)


def share_errors(
    name: str, process_set: ProcessSet = global_process_set
) -> AbstractContextManager[None]:
    """Turn an error on one rank into an error on all; see ``hvdkit.agreement.share_errors``.

    Collective: every rank of ``process_set`` must enter, with the same ``name``.
    """
    return agreement.share_errors(name, gather=gather_over(process_set), ranks=process_set.ranks)


def _allgather_bytes(payload: bytes, name: str, process_set: ProcessSet) -> list[bytes]:
    """Gather byte strings of any length in one collective: each travels behind its length."""
    framed = bytearray(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
    sent = torch.frombuffer(framed, dtype=torch.uint8)
    received = allgather(sent, name=f"hvdkit.{name}", process_set=process_set)
    data = received.numpy().tobytes()
    parts, start = [], 0
    while start < len(data):
        end = start + _LENGTH_BYTES + int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
        parts.append(data[start + _LENGTH_BYTES : end])
        start = end
    return parts
