"""What a run's figures show: spikes of the loss, slow ranks, memory that grows. Pure policy.

Adapters gather the figures of all ranks and feed every rank the same, so that all find alike.
Each detector speaks once an episode: again only after what it found was gone.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError

__all__ = [
    "Detectors",
    "Figures",
    "Finding",
    "LossSpikeDetector",
    "MemoryGrowthDetector",
    "StragglerDetector",
    "read_resident_bytes",
]

_MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class Figures:
    """What one rank measured over a window of steps.

    Attributes:
        step_s: Median time of a step.
        own_s: Median time of a step without its waits for other ranks.
        memory_bytes: Resident set of the process.
        device_memory_bytes: Allocated on its accelerator; 0 without one.
        losses: Of each step, NaN where unknown.
    """

    step_s: float
    own_s: float
    memory_bytes: float
    device_memory_bytes: float
    losses: tuple[float, ...] = ()

    @property
    def wait_share(self) -> float:
        """The part of a step that is spent waiting for other ranks."""
        return 1 - self.own_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def loss(self) -> float:
        """Mean of the losses that are known and finite; NaN without one."""
        known = [loss for loss in self.losses if math.isfinite(loss)]
        return statistics.fmean(known) if known else math.nan

    def named(self) -> dict[str, float]:
        """Return the figures by the names that Prometheus and TensorBoard get."""
        return {
            "step_time_seconds": self.step_s,
            "wait_share": self.wait_share,
            "memory_bytes": self.memory_bytes,
            "device_memory_bytes": self.device_memory_bytes,
            "loss": self.loss,
        }


@dataclass(frozen=True)
class Finding:
    """Something to tell people: the arguments of ``EventLog.emit``."""

    kind: str
    message: str
    rank: int | None = None
    step: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class LossSpikeDetector:
    """Finds a loss far above the recent ones.

    Far is more than ``factor`` robust standard deviations (from the median absolute deviation)
    above the median. Both are hardly moved by the spikes themselves.

    Args:
        factor: How many.
        window: How many recent losses to compare with.
        warmup: How many to see before the first judgement.

    Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use
    absolute deviation around the median", Journal of Experimental Social Psychology 49 (2013).
    """

    def __init__(self, factor: float = 10.0, window: int = 100, warmup: int = 20) -> None:
        self.factor = factor
        self.warmup = warmup
        self._recent: deque[float] = deque(maxlen=window)
        self._in_spike = False

    def add(self, step: int, loss: float) -> list[Finding]:
        """Judge the loss of one step; one that is not finite is left out."""
        if not math.isfinite(loss):
            return []
        found = []
        if len(self._recent) >= self.warmup:
            median = statistics.median(self._recent)
            spread = statistics.median(abs(one - median) for one in self._recent)
            # Losses that hardly vary must not make every change a spike.
            sigma = max(_MAD_TO_SIGMA * spread, 1e-3 * abs(median))
            limit = median + self.factor * sigma
            if loss > limit and not self._in_spike:
                message = f"the loss rose to {loss:.6g}; the median before was {median:.6g}"
                details = {"loss": loss, "median": median, "limit": limit}
                found.append(Finding("loss_spike", message, step=step, details=details))
            self._in_spike = loss > limit
        self._recent.append(loss)
        return found


class StragglerDetector:
    """Finds ranks that need longer than the others for their own part of a step.

    In synchronous training all ranks have the same step time. Who waits least is slow; so the
    time without waits is compared, with the median of the other ranks.

    Args:
        factor: How much longer.
        least_s: And by how much at least, in seconds.
    """

    def __init__(self, factor: float = 1.5, least_s: float = 1e-3) -> None:
        self.factor = factor
        self.least_s = least_s
        self._slow: set[int] = set()

    def add(self, step: int, own_s: Mapping[int, float]) -> list[Finding]:
        """Judge one window, by the time of each rank."""
        found = []
        ordered = sorted(own_s.values())
        for rank, mine in own_s.items():
            others = _median_without(ordered, mine)
            slow = mine > self.factor * others and mine - others > self.least_s
            if slow and rank not in self._slow:
                message = (
                    f"rank {rank} needs {mine * 1e3:.1f} ms for its part of a step, the others "
                    f"{others * 1e3:.1f} ms (median), and wait for it"
                )
                details = {"own_s": mine, "median_s": others}
                found.append(Finding("straggler", message, rank, step, details))
            (self._slow.add if slow else self._slow.discard)(rank)
        return found


class MemoryGrowthDetector:
    """Finds memory that keeps growing.

    Growth is the lower quartile of the slopes between all pairs of windows, times their span. Sen
    takes the median, which a single jump in the middle, such as a first validation, would move.

    Args:
        least_bytes: What has to be gained over the windows looked at.
        least_share: And what part of the memory held.
        windows: How many to look at.
        warmup: How many to leave out at the start, while caches fill.

    Source: Sen, "Estimates of the regression coefficient based on Kendall's tau", Journal of the
    American Statistical Association 63 (1968).
    """

    def __init__(
        self,
        least_bytes: float = 64 * 2**20,
        least_share: float = 0.05,
        windows: int = 10,
        warmup: int = 2,
    ) -> None:
        self.least_bytes = least_bytes
        self.least_share = least_share
        self.warmup = warmup
        self._windows = windows
        self._seen: dict[tuple[int, str], int] = {}
        self._held: dict[tuple[int, str], deque[tuple[int, float]]] = {}
        self._growing: set[tuple[int, str]] = set()

    def add(self, step: int, rank: int, what: str, size_bytes: float) -> list[Finding]:
        """Judge what one rank holds, ``what`` being memory of one kind."""
        key = (rank, what)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= self.warmup or not math.isfinite(size_bytes):
            return []
        held = self._held.setdefault(key, deque(maxlen=self._windows))
        held.append((step, size_bytes))
        if len(held) < self._windows:
            return []
        slopes = [
            (after - before) / max(late - early, 1)
            for (early, before), (late, after) in combinations(held, 2)
        ]
        slope = statistics.quantiles(slopes, n=4)[0]
        steps = held[-1][0] - held[0][0]
        growth = slope * steps
        middle = statistics.median(size for _, size in held)
        grows = growth > max(self.least_bytes, self.least_share * middle)
        started = grows and key not in self._growing
        (self._growing.add if grows else self._growing.discard)(key)
        if not started:
            return []
        message = (
            f"{what} of rank {rank} grows by {slope / 1024:.0f} KiB a step: "
            f"{growth / 2**20:.0f} MiB in {steps} steps, to {size_bytes / 2**20:.0f} MiB"
        )
        details = {"bytes_per_step": slope, "growth_bytes": growth, "size_bytes": size_bytes}
        return [Finding("memory_growth", message, rank, step, details)]


class Detectors:
    """All three, fed with the figures of all ranks once a window.

    Args:
        straggler_factor: See ``StragglerDetector``.
        spike_factor: See ``LossSpikeDetector``.
    """

    def __init__(self, straggler_factor: float = 1.5, spike_factor: float = 10.0) -> None:
        for name, value in (("straggler_factor", straggler_factor), ("spike_factor", spike_factor)):
            if not value > 1:
                raise HvdkitError(f"{name} must be above 1, not {value}")
        self._stragglers = StragglerDetector(straggler_factor)
        self._spikes = LossSpikeDetector(spike_factor)
        self._memory = MemoryGrowthDetector()

    def add(self, step: int, figures: Mapping[int, Figures]) -> list[Finding]:
        """Return what a window that ended with ``step`` shows, by the figures of each rank."""
        found = self._stragglers.add(step, {rank: one.own_s for rank, one in figures.items()})
        for rank, one in figures.items():
            found += self._memory.add(step, rank, "the memory", one.memory_bytes)
            found += self._memory.add(step, rank, "device memory", one.device_memory_bytes)
        columns = list(zip(*(one.losses for one in figures.values()), strict=True))
        for number, column in enumerate(columns):
            known = [loss for loss in column if math.isfinite(loss)]
            mean = statistics.fmean(known) if known else math.nan
            found += self._spikes.add(step - len(columns) + 1 + number, mean)
        return found


def read_resident_bytes() -> float:
    """Return the resident set of this process; NaN where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return math.nan
    return float(int(pages) * os.sysconf("SC_PAGE_SIZE"))


def _median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of sorted values but for one of them; of a single value itself."""
    if len(ordered) == 1:
        return one
    rest = list(ordered)
    rest.remove(one)
    return statistics.median(rest)
