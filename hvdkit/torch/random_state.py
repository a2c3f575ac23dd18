"""The random state of every rank, for a checkpoint to hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvdkit.random_state import (
    choose_state,
    read_random_state,
    seed_generators,
    set_random_state,
)
from hvdkit.torch.collectives import allgather_object

__all__ = ["gather_random_state", "restore_random_state"]


def gather_random_state(process_set: ProcessSet = global_process_set) -> list[dict[str, Any]]:
    """Return the random state of every rank, for ``store.save(..., random=...)``.

    That of PyTorch on the CPU and on this rank's CUDA device, of NumPy's global generator and of
    Python's ``random``; about 14 KiB a rank. ``restore_or_broadcast`` gives it back. With another
    number of ranks, a generator that was the same on all is so again; others are seeded with what
    follows from the saved states and the rank.

    Generators of your own are not in it: save their states as extra. A ``DataLoader`` draws from
    PyTorch's generator when its iteration begins, and a run that goes on in the middle of an epoch
    begins one more: give it one of its own, ``DataLoader(..., generator=torch.Generator())``.

    Collective: every rank of ``process_set`` must call.
    """
    return allgather_object(
        read_random_state(), name="gather_random_state", process_set=process_set
    )


def restore_random_state(states: Sequence[dict[str, Any]], process_set: ProcessSet) -> None:
    """Set this rank's generators to what ``gather_random_state`` returned."""
    state, seeds = choose_state(states, process_set.rank(), process_set.size())
    set_random_state(state)
    seed_generators(seeds)
