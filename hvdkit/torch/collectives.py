"""Small collectives over Python objects, and errors that reach every rank.

Horovod names an operation without a name after a running count of the operations of its own
rank, so ranks that did a different number of things before no longer match. Every operation
here takes an explicit name. One name serves any number of calls one after another.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch
from horovod.torch.mpi_ops import ProcessSet, allgather, global_process_set

from hvdkit.errors import RankDisagreementError

_LENGTH_BYTES = 8

__all__ = [
    "allgather_object",
    "broadcast_object",
    "demand_agreement",
    "format_ranks",
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


def demand_agreement(
    what: str, value: Any, *, name: str, process_set: ProcessSet = global_process_set
) -> None:
    """Raise the same error on every rank unless all ranks hold an equal ``value``.

    Collective: every rank of ``process_set`` must call, with the same ``name``.

    Args:
        what: What the value is, for the message ("the optimizer's class").
        value: Compared by ``==``.

    Raises:
        RankDisagreementError: Names the first differing value and the ranks on each side.
    """
    values = allgather_object(value, name=name, process_set=process_set)
    differing = [i for i, other in enumerate(values) if other != values[0]]
    if not differing:
        return
    ranks = process_set.ranks
    same = [ranks[i] for i in range(len(values)) if i not in differing]
    first = differing[0]
    others = [ranks[i] for i in differing if values[i] == values[first]]
    raise RankDisagreementError(
        f"{what} must be the same on every rank, but {format_ranks(same)} has {values[0]!r} "
        f"and {format_ranks(others)} has {values[first]!r}"
    )


@contextmanager
def share_errors(name: str, process_set: ProcessSet = global_process_set) -> Iterator[None]:
    """Turn an error on one rank into an error on all, so that nobody waits for the failed one.

    The rank that failed raises its own error, the others one that quotes it. The body must
    not contain a collective that a failing rank would miss.

    Collective: every rank of ``process_set`` must enter, with the same ``name``.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    report = None if error is None else f"{type(error).__name__}: {error}"
    reports = allgather_object(report, name=name, process_set=process_set)
    if error is not None:
        raise error
    for rank, text in zip(process_set.ranks, reports, strict=True):
        if text is not None:
            raise RankDisagreementError(f"rank {rank} failed with {text}")


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: ``rank 3`` or ``ranks 0, 1, 2``; long lists are cut."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) > 8:
        shown += f", ... ({len(ranks)} in all)"
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


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
