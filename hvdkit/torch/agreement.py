"""Find the first of many things that ranks should hold alike and do not."""

from __future__ import annotations

from collections.abc import Sequence

from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvdkit import agreement
from hvdkit.agreement import Difference
from hvdkit.errors import HvdkitError
from hvdkit.torch.collectives import gather_over

__all__ = ["demand_equal_entries", "find_difference"]


def find_difference(
    entries: Sequence[tuple[str, str]] | HvdkitError,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> Difference | None:
    """Compare labelled values over the ranks; see ``hvdkit.agreement.find_difference``.

    Collective: every rank of ``process_set`` must call, with the same ``name``.
    """
    return agreement.find_difference(
        entries, name=name, gather=gather_over(process_set), ranks=process_set.ranks
    )


def demand_equal_entries(
    what: str,
    entries: Sequence[tuple[str, str]] | HvdkitError,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
    advice: str = "",
) -> None:
    """Raise on every rank unless all list the same; see ``hvdkit.agreement``.

    Collective: every rank of ``process_set`` must call, with the same ``name``.
    """
    agreement.demand_equal_entries(
        what,
        entries,
        name=name,
        gather=gather_over(process_set),
        ranks=process_set.ranks,
        advice=advice,
    )
