"""What follows the number of workers when it changes: accumulated passes and learning rates."""

from __future__ import annotations

from hvdkit.errors import HvdkitError
from hvdkit.schedule import scaling_factor

__all__ = ["choose_passes", "rate_change"]


def choose_passes(batches: int, workers: int) -> int:
    """Return how many passes a worker accumulates so that a step keeps its batch.

    Args:
        batches: Local batches that make up one step, over all workers.
        workers: How many there are now.

    Returns:
        ``batches / workers``, rounded to the nearest (halves up), at least 1.

    Raises:
        HvdkitError: If either is below 1.
    """
    if batches < 1 or workers < 1:
        raise HvdkitError(
            f"batches of a step and workers are at least 1, got {batches} and {workers}"
        )
    return max(1, (2 * batches + workers) // (2 * workers))


def rate_change(before: int, after: int, rule: str) -> float:
    """Return what to multiply a learning rate by when the batch of a step changes.

    Args:
        before: Local batches of a step, over all workers, that the rate was made for.
        after: As many as there are now.
        rule: ``"linear"``, ``"sqrt"`` or ``"none"``; see ``hvdkit.schedule.scaling_factor``.

    Raises:
        HvdkitError: If the rule is unknown, or a number is below 1.
    """
    return scaling_factor(after, rule) / scaling_factor(before, rule)
