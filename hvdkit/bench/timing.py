"""Training steps under the clock, and the memory that they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

__all__ = ["find_slowest", "read_peak_rss_bytes", "rotate", "summarize_round", "time_steps"]


def time_steps(step: Callable[[], object], steps: int) -> list[float]:
    """Run ``step`` once untimed and then ``steps`` times; return the seconds of each.

    The untimed step absorbs what a resumed process finds cold, and the ranks' different start.
    Collective, for a step that communicates.
    """
    durations_s = []
    for _ in range(steps + 1):
        start_s = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - start_s)
    return durations_s[1:]


def rotate(names: Sequence[str], turn: int) -> list[str]:
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
