"""Replicas that differ: which version to trust, and what to say.

Framework-free, as ``hvdkit.agreement``: an adapter brings the digests and the collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hvdkit.agreement import Difference, Gather, find_difference, format_ranks
from hvdkit.errors import HvdkitError, ReplicaMismatchError

__all__ = ["ADVICE", "demand_equal_replicas"]

ADVICE = "; broadcast_initial_state makes them equal"


def demand_equal_replicas(
    digest: Callable[[], bytes],
    describe: Callable[[], list[tuple[str, str]]],
    measure: Callable[[int, int], float],
    *,
    name: str,
    gather: Gather,
    ranks: Sequence[int],
) -> None:
    """Raise the same error on every rank unless all hold the same.

    One digest of everything travels while the replicas are equal.

    Collective: every one of ``ranks`` must call, with the same ``name``.

    Args:
        digest: Returns a digest of all that is compared, names included; may raise HvdkitError.
        describe: Lists each part as name and text. A tensor's text has its dtype and shape, and
            behind the word ``digest`` its digest; that of a number is the number.
        measure: Is given the place of a tensor in that list and the rank that holds the
            reference, and returns the largest absolute difference from it on this rank. It is
            called on every rank, or on none.
        name: Names the operations.
        gather: As for ``find_difference``.
        ranks: The ranks that are compared.

    Raises:
        ReplicaMismatchError: Names the first part that differs, the ranks that hold each version,
            and the largest difference from the version that most ranks hold.
    """
    entries: list[tuple[str, str]] | HvdkitError
    try:
        entries = [("replica", digest().hex())]
    except HvdkitError as error:
        entries = error
    if find_difference(entries, name=name, gather=gather, ranks=ranks) is None:
        return
    difference = find_difference(describe(), name=f"{name}.parts", gather=gather, ranks=ranks)
    if difference is None:
        return  # the digest of the whole depends on which tensors share a device
    # Most ranks are right; of two equal parties the one with the lowest rank.
    _, trusted = max(difference.versions, key=lambda version: len(version[1]))
    sizes = _measure(difference, trusted[0], measure, name, gather)
    largest = None
    message = f"replicas differ, first at {difference}"
    if sizes is not None:
        largest = math.nan if any(map(math.isnan, sizes)) else max(sizes)
        far = [
            rank
            for rank, size in zip(ranks, sizes, strict=True)
            if size == largest or math.isnan(size)
        ]
        text = "NaN on one side alone" if math.isnan(largest) else f"{largest:.6g}"
        message += f"; largest difference from rank {trusted[0]}: {text} (on {format_ranks(far)})"
    raise ReplicaMismatchError(
        f"{message}{ADVICE}",
        name=next(entry[0] for entry, _ in difference.versions if entry is not None),
        ranks=tuple(rank for rank in ranks if rank not in trusted),
        largest_difference=largest,
    )


def _measure(
    difference: Difference,
    root: int,
    measure: Callable[[int, int], float],
    name: str,
    gather: Gather,
) -> list[float] | None:
    """Return each rank's largest difference from the root; None where nothing can be subtracted."""
    entries = [entry for entry, _ in difference.versions if entry is not None]
    if len(entries) < len(difference.versions) or len({label for label, _ in entries}) > 1:
        return None
    kinds = {text.partition(" digest ")[0] for _, text in entries}
    if len(kinds) == 1 and all(" digest " in text for _, text in entries):
        return gather(measure(difference.index, root), f"{name}.difference")
    try:
        numbers = {
            rank: float(entry[1])
            for entry, ranks in difference.versions
            for rank in ranks
            if entry is not None
        }
    except ValueError:
        return None
    return [abs(numbers[rank] - numbers[root]) for rank in sorted(numbers)]
