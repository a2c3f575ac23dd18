"""Objects on all ranks, and agreement over them, on either backend of Keras."""

from __future__ import annotations

import pickle
from typing import Any

from hvdkit.agreement import Gather
from hvdkit.keras.backend import allgather_bytes

__all__ = ["allgather_object", "gather_over"]


def allgather_object(obj: Any, *, name: str, process_set: Any) -> list[Any]:
    """Gather one picklable object from every rank, in the order of the ranks.

    Collective: every rank of ``process_set`` must call, with the same ``name``.
    """
    parts = allgather_bytes(pickle.dumps(obj), name=f"hvdkit.{name}", process_set=process_set)
    return [pickle.loads(part) for part in parts]


def gather_over(process_set: Any) -> Gather:
    """Return ``allgather_object`` as ``hvdkit.agreement`` wants it."""
    return lambda obj, name: allgather_object(obj, name=name, process_set=process_set)
