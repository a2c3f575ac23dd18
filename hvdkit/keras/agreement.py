"""Things that ranks should hold alike, compared over a process set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit import agreement
from hvdkit.errors import HvdkitError
from hvdkit.keras.collectives import gather_over

__all__ = ["demand_equal_entries"]


def demand_equal_entries(
    what: str,
    entries: Sequence[tuple[str, str]] | HvdkitError,
    *,
    name: str,
    process_set: Any,
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
