"""Find the first of many things that ranks should hold alike and do not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvdkit.errors import HvdkitError, RankDisagreementError
from hvdkit.torch.collectives import allgather_object, format_ranks

__all__ = ["Difference", "demand_equal_entries", "find_difference"]


@dataclass(frozen=True)
class Difference:
    """The first entry that is not the same on every rank."""

    versions: list[tuple[tuple[str, str] | None, list[int]]]
    """Each version, a label and a value or None where there is no such entry, with its ranks."""

    def __str__(self) -> str:
        """Name the entry and who holds which version of it."""
        labels = {entry[0] for entry, _ in self.versions if entry is not None}
        shared = labels.pop() if len(labels) == 1 else None
        parts = []
        for entry, ranks in self.versions:
            verb = "has" if len(ranks) == 1 else "have"
            if entry is None:
                held = "nothing"
            else:
                held = entry[1] if shared is not None else f"{entry[0]!r}: {entry[1]}"
            parts.append(f"{format_ranks(ranks)} {verb} {held}")
        return (f"{shared!r}: " if shared is not None else "") + "; ".join(parts)


def find_difference(
    entries: Sequence[tuple[str, str]] | HvdkitError,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> Difference | None:
    """Compare a list of labelled values over the ranks.

    Only a digest travels as long as the ranks agree, whatever the length of the list.

    Collective: every rank of ``process_set`` must call, with the same ``name``.

    Args:
        entries: Label and value of each entry, or the error that kept this rank from listing
            them: it is then raised on every rank.
        name: Names the operation, as in ``allgather_object``.
        process_set: The ranks to compare.

    Returns:
        None when the lists are equal.
    """
    problem = entries if isinstance(entries, HvdkitError) else None
    listed = [] if isinstance(entries, HvdkitError) else list(entries)
    digest = hashlib.sha256(repr(listed).encode()).digest()
    reports = allgather_object(
        (digest, None if problem is None else str(problem)), name=name, process_set=process_set
    )
    if problem is not None:
        raise problem
    for rank, (_, text) in zip(process_set.ranks, reports, strict=True):
        if text is not None:
            raise RankDisagreementError(f"rank {rank}: {text}")
    if all(report == reports[0] for report in reports):
        return None
    lists = allgather_object(listed, name=f"{name}.entries", process_set=process_set)
    for index in range(max(map(len, lists))):
        holders: dict[tuple[str, str] | None, list[int]] = {}
        for rank, held in zip(process_set.ranks, lists, strict=True):
            entry = held[index] if index < len(held) else None
            holders.setdefault(entry, []).append(rank)
        if len(holders) > 1:
            return Difference(list(holders.items()))
    raise AssertionError("digests differ over equal lists")


def demand_equal_entries(
    what: str,
    entries: Sequence[tuple[str, str]] | HvdkitError,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Raise the same error on every rank unless all list the same entries.

    Collective: every rank of ``process_set`` must call, with the same ``name``.

    Args:
        what: Completes "... must be the same on every rank".
        entries: As in ``find_difference``, as are the others.
        name: Names the operation.
        process_set: The ranks to compare.

    Raises:
        RankDisagreementError: Names the first entry that differs and the ranks on each side.
    """
    difference = find_difference(entries, name=name, process_set=process_set)
    if difference is not None:
        raise RankDisagreementError(f"{what} must be the same on every rank, but {difference}")
