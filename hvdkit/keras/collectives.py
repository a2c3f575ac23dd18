"""Small collectives over Python objects, and errors that reach every rank, on either backend."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any

from hvdkit import agreement
from hvdkit.agreement import Gather
from hvdkit.keras.backend import allgather_bytes

__all__ = ["allgather_object", "gather_over", "share_errors"]


def allgather_object(obj: Any, *, name: str, process_set: Any) -> list[Any]:
    """Gather one picklable object from every rank, in the order of the ranks.

    Collective: every rank of ``process_set`` must call, with the same ``name``.
    """
    parts = allgather_bytes(pickle.dumps(obj), name=f"hvdkit.{name}", process_set=process_set)
    return [pickle.loads(part) for part in parts]


def gather_over(process_set: Any) -> Gather:
    """Return ``allgather_object`` as ``hvdkit.agreement`` wants it."""
    return lambda obj, name: allgather_object(obj, name=name, process_set=process_set)


def share_errors(name: str, process_set: Any) -> AbstractContextManager[None]:
    """Turn an error on one rank into an error on all; see ``hvdkit.agreement.share_errors``.

    Collective: every rank of ``process_set`` must enter, with the same ``name``.
    """
    return agreement.share_errors(name, gather=gather_over(process_set), ranks=process_set.ranks)
