"""What happens when the number of workers changes: a new start, and what follows the number."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hvdkit.errors import HvdkitError
from hvdkit.schedule import scaling_factor

ATTEMPTS = 4
_REMOVED = "removed from elastic job"  # Horovod's words
_logger = logging.getLogger("hvdkit")

__all__ = ["choose_passes", "rate_change", "restart"]


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


def restart(shutdown: Callable[[], None], init: Callable[[], None]) -> None:
    """Leave the workers of before and join those of now.

    Another one may be lost meanwhile; those that are left then try again.

    Args:
        shutdown: Horovod's.
        init: Horovod's; raises ValueError when not all come together in time.

    Raises:
        SystemExit: If this worker is none of them any more.
        ValueError: If they did not come together in several attempts.
    """
    for attempt in range(1, ATTEMPTS + 1):
        shutdown()
        try:
            init()
            return
        except ValueError as error:
            if _REMOVED in str(error):
                raise SystemExit(f"this worker has left the elastic job: {error}") from None
            if attempt == ATTEMPTS:
                raise
            _logger.warning("the workers did not come together, trying again: %s", error)
