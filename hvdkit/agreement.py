"""What ranks should hold alike: find the first difference, and raise one error on all ranks.

Framework-free: an adapter passes ``gather``, a collective that takes this rank's object and the
name of the operation and returns the objects of all ranks, in the order of ``ranks``.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hvdkit import __version__
from hvdkit.errors import HvdkitError, RankDisagreementError

__all__ = [
    "Difference",
    "Gather",
    "demand_equal_entries",
    "describe_versions",
    "find_difference",
    "format_ranks",
    "share_errors",
]

Gather = Callable[[Any, str], list[Any]]

# What one rank sends at most once lists differ: some digests of pieces, and one entry.
_PIECES = 32
_TEXT_LENGTH = 1000
_SHOWN_VERSIONS = 6


@dataclass(frozen=True)
class Difference:
    """The first entry that is not the same on every rank."""

    index: int
    """Its place in the lists."""
    versions: list[tuple[tuple[str, str] | None, list[int]]]
    """Each version, a label and a value or None where there is no such entry, with its ranks."""

    def __str__(self) -> str:
        """Name the entry and who holds which version of it."""
        labels = {entry[0] for entry, _ in self.versions if entry is not None}
        shared = labels.pop() if len(labels) == 1 else None
        parts = []
        for entry, ranks in self.versions[:_SHOWN_VERSIONS]:
            verb = "has" if len(ranks) == 1 else "have"
            if entry is None:
                held = "nothing"
            else:
                held = entry[1] if shared is not None else f"{entry[0]!r}: {entry[1]}"
            parts.append(f"{format_ranks(ranks)} {verb} {held}")
        others = sum(len(ranks) for _, ranks in self.versions[_SHOWN_VERSIONS:])
        if others:
            parts.append(f"{others} more ranks have yet others")
        return (f"{shared!r}: " if shared is not None else "") + "; ".join(parts)


def find_difference(
    entries: Sequence[tuple[str, str]] | HvdkitError,
    *,
    name: str,
    gather: Gather,
    ranks: Sequence[int],
) -> Difference | None:
    """Compare a list of labelled values over the ranks.

    Only a digest travels as long as the ranks agree, whatever the length of the list. Where they
    do not, the first difference is searched by the digests of pieces: a rank sends about 1 KiB a
    round, in a few rounds.

    Collective: every one of ``ranks`` must call, with the same ``name``.

    Args:
        entries: Label and value of each entry, or the error that kept this rank from listing
            them: it is then raised on every rank.
        name: Names the operation.
        gather: See the module.
        ranks: The ranks that are compared.

    Returns:
        None when the lists are equal.
    """
    problem = entries if isinstance(entries, HvdkitError) else None
    listed = [] if isinstance(entries, HvdkitError) else list(entries)
    text = None if problem is None else _shorten(str(problem))
    reports = gather((_digest(listed), len(listed), text), name)
    if problem is not None:
        raise problem
    for rank, (_, _, text) in zip(ranks, reports, strict=True):
        if text is not None:
            raise RankDisagreementError(f"rank {rank}: {text}")
    if all(report == reports[0] for report in reports):
        return None
    start, end = 0, max(length for _, length, _ in reports)
    while end - start > 1:
        step = -(-(end - start) // _PIECES)
        pieces = [(at, min(at + step, end)) for at in range(start, end, step)]
        digests = gather([_digest(listed[i:j])[:8] for i, j in pieces], f"{name}.pieces")
        start, end = next(
            piece
            for piece, *held in zip(pieces, *digests, strict=True)
            if any(digest != held[0] for digest in held)
        )
    holders: dict[tuple[str, str] | None, list[int]] = {}
    entry = (_shorten(listed[start][0]), _shorten(listed[start][1])) if listed[start:] else None
    for rank, held in zip(ranks, gather(entry, f"{name}.entry"), strict=True):
        holders.setdefault(held, []).append(rank)
    return Difference(start, list(holders.items()))


def _digest(entries: Sequence[tuple[str, str]]) -> bytes:
    return hashlib.sha256(repr(entries).encode()).digest()


def _shorten(text: str) -> str:
    """Cut a long text, but keep two that differ apart."""
    if len(text) <= _TEXT_LENGTH:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{text[:_TEXT_LENGTH]} ... ({len(text)} characters, digest {digest})"


def demand_equal_entries(
    what: str,
    entries: Sequence[tuple[str, str]] | HvdkitError,
    *,
    name: str,
    gather: Gather,
    ranks: Sequence[int],
    advice: str = "",
) -> None:
    """Raise the same error on every rank unless all list the same entries.

    Collective: every one of ``ranks`` must call, with the same ``name``.

    Args:
        what: Completes "... must be the same on every rank".
        entries: As in ``find_difference``, as are the others.
        name: Names the operation.
        gather: See the module.
        ranks: The ranks that are compared.
        advice: What to do about it.

    Raises:
        RankDisagreementError: Names the first entry that differs and the ranks on each side.
    """
    difference = find_difference(entries, name=name, gather=gather, ranks=ranks)
    if difference is not None:
        raise RankDisagreementError(
            f"{what} must be the same on every rank, but {difference}"
            f"{'; ' if advice else ''}{advice}"
        )


def describe_versions(frameworks: Mapping[str, str]) -> list[tuple[str, str]]:
    """List the versions that must be the same on every rank, as entries.

    Patch releases of Python and builds of one framework version for other hardware may differ.

    Args:
        frameworks: The version of each, by its name.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return [
        ("version of hvdkit", __version__),
        *((f"version of {name}", text.partition("+")[0]) for name, text in frameworks.items()),
        ("version of Python", python),
    ]


@contextmanager
def share_errors(name: str, *, gather: Gather, ranks: Sequence[int]) -> Iterator[None]:
    """Turn an error on one rank into an error on all, so that nobody waits for the failed one.

    The rank that failed raises its own error, the others one that quotes it. The body must
    not contain a collective that a failing rank would miss.

    Collective: every one of ``ranks`` must enter, with the same ``name``.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    text = None if error is None else _shorten(f"{type(error).__name__}: {error}")
    reports = gather(text, name)
    if error is not None:
        raise error
    for rank, text in zip(ranks, reports, strict=True):
        if text is not None:
            raise RankDisagreementError(f"rank {rank} failed with {text}")


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: ``rank 3`` or ``ranks 0, 1, 2``; long lists are cut."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) > 8:
        shown += f", ... ({len(ranks)} in all)"
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
