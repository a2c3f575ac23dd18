"""Ranks that build an optimizer compare what must be equal, before it can hang or diverge."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from horovod.torch.mpi_ops import ProcessSet

from hvdkit.errors import RankDisagreementError
from hvdkit.torch.collectives import allgather_object, format_ranks

__all__ = ["demand_same_items"]


def demand_same_items(
    items: Sequence[tuple[str, Any]], *, name: str, process_set: ProcessSet
) -> None:
    """Raise the same error on every rank unless all ranks pass equal items.

    Only a digest travels as long as ranks agree.

    Collective: every rank of ``process_set`` must call, with the same ``name``.

    Args:
        items: What each value is, for the message, and the value, of plain types.

    Raises:
        RankDisagreementError: Names the first differing item and the ranks on each side.
    """
    digest = hashlib.blake2b(repr(items).encode(), digest_size=16).digest()
    digests = allgather_object(digest, name=f"{name}.digest", process_set=process_set)
    if all(other == digests[0] for other in digests):
        return
    everyone = allgather_object(list(items), name=f"{name}.items", process_set=process_set)
    for position in range(max(map(len, everyone))):
        by_value: dict[str, list[int]] = {}
        for rank, theirs in zip(process_set.ranks, everyone, strict=True):
            item = theirs[position] if position < len(theirs) else ("nothing more", None)
            by_value.setdefault(f"{item[0]} = {item[1]!r}", []).append(rank)
        if len(by_value) > 1:
            sides = "; ".join(
                f"{value} on {format_ranks(ranks)}" for value, ranks in by_value.items()
            )
            raise RankDisagreementError(
                f"The ranks disagree: {sides}. Build the same model and optimizer, with "
                "parameters in the same order, on every rank."
            )
