"""Many durations in little memory: a histogram for quantiles, and a sample of steps."""

from __future__ import annotations

import math
import random
from array import array
from typing import Any

__all__ = ["Durations", "Reservoir"]

# Eight bins an octave, from 1 microsecond to more than an hour: a quantile is at most 9 % too high.
_PER_OCTAVE = 8
_BINS = 32 * _PER_OCTAVE


class Durations:
    """Count, sum, largest and quantiles of durations in microseconds."""

    __slots__ = ("_bins", "count", "max_us", "sum_us")

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0.0
        self.max_us = 0.0
        self._bins = array("I", bytes(4 * _BINS))

    def add(self, duration_us: float) -> None:
        """Count one duration, of at least 0."""
        self.count += 1
        self.sum_us += duration_us
        if duration_us > self.max_us:
            self.max_us = duration_us
        index = int(_PER_OCTAVE * math.log2(duration_us)) if duration_us > 1 else 0
        self._bins[min(index, _BINS - 1)] += 1

    def mean_us(self) -> float:
        """Return the mean; 0 without any."""
        return self.sum_us / self.count if self.count else 0.0

    def quantile_us(self, share: float) -> float:
        """Return what ``share`` of the durations do not exceed; 0 without any."""
        rank = share * self.count
        seen = 0
        for index, count in enumerate(self._bins[:-1]):
            seen += count
            if count and seen >= rank:
                edge: float = 2 ** ((index + 1) / _PER_OCTAVE)
                return min(edge, self.max_us)
        return self.max_us


class Reservoir:
    """A uniform sample of rows of any number; all of them while there are few.

    Source: J. Vitter, "Random sampling with a reservoir", ACM TOMS 11 (1985), algorithm R.

    Args:
        size: How many rows to keep.
    """

    def __init__(self, size: int = 1000) -> None:
        self.count = 0
        self._size = size
        self._rows: list[tuple[int, Any]] = []
        self._random = random.Random(0)

    def add(self, row: Any) -> None:
        """Offer one row."""
        if len(self._rows) < self._size:
            self._rows.append((self.count, row))
        else:
            place = self._random.randrange(self.count + 1)
            if place < self._size:
                self._rows[place] = (self.count, row)
        self.count += 1

    def rows(self) -> list[Any]:
        """Return the rows that were kept, in the order in which they came."""
        return [row for _, row in sorted(self._rows, key=lambda one: one[0])]
