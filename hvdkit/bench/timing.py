"""Training steps under the clock, and the memory that they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["Feed", "find_slowest", "read_peak_rss_bytes", "rotate", "summarize_round", "time_steps"]


class Feed:
    """Batches, and the time that was spent waiting for them."""

    def __init__(self, batches: Iterator[Any]) -> None:
        """Draw from ``batches``, which never end."""
        self._batches = batches
        self._waited_s = 0.0

    def draw(self) -> Any:
        """Return the next batch."""
        start_s = time.perf_counter()
        batch = next(self._batches)
        self._waited_s += time.perf_counter() - start_s
        return batch

    def take_wait(self) -> float:
        """Return the seconds waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


def time_steps(
    step: Callable[[], object], steps: int, feed: Feed | None = None
) -> dict[str, list[float]]:
    """Run ``step`` once untimed and then ``steps`` times; return the seconds of each.

    The untimed step absorbs what a resumed process finds cold, and the ranks' different start.
    Collective, for a step that communicates.

    Args:
        step: Done when what it started is done.
        steps: To time.
        feed: Where a step draws its batches, if their time shall be told apart.

    Returns:
        ``step_s``, and with a feed ``input_s``: the part of a step spent waiting for batches.
    """
    step()
    if feed is not None:
        feed.take_wait()
    durations_s, waits_s = [], []
    for _ in range(steps):
        start_s = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - start_s)
        if feed is not None:
            waits_s.append(feed.take_wait())
    return {"step_s": durations_s} if feed is None else {"step_s": durations_s, "input_s": waits_s}


def rotate(names: Sequence[Any], turn: int) -> list[Any]:
    """Return the names with another one first each turn, so that none always follows the same."""
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]


def find_slowest(ranks_s: Sequence[Sequence[float]]) -> list[float]:
    """Return each step's duration: that of its slowest rank. ``ranks_s`` is [rank][step]."""
    return [max(step_s) for step_s in zip(*ranks_s, strict=True)]


def summarize_round(ranks_s: Sequence[Sequence[float]]) -> float:
    """Return the median step of a round, in seconds. ``ranks_s`` is [rank][step]."""
    return median(find_slowest(ranks_s))


def read_peak_rss_bytes() -> int:
    """Return the largest resident size that this process has had (Linux's VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line; peak memory needs Linux")
