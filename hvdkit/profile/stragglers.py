"""Who came last, how often, and how long the others waited for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Lateness"]

# Below this share of the time that was looked at, lateness is not worth a name.
_WORTH_NAMING = 0.01


class Lateness:
    """Meetings of the ranks, each with the one that came last.

    A meeting counts for the rank that came last, with the time since the one before it: what all
    would have won had it come with the others.
    """

    def __init__(self) -> None:
        self.meetings = 0
        self.ties = 0
        self._ranks: dict[int, list[float]] = {}  # times last, sum and largest in us

    def add(self, arrivals: Sequence[tuple[float, int]], tolerance_us: float) -> None:
        """Count one meeting.

        Args:
            arrivals: Time in microseconds and rank, of two ranks or more.
            tolerance_us: A lead that is not larger makes a tie.
        """
        *_, (before_us, _), (last_us, rank) = sorted(arrivals)
        for _, one in arrivals:
            self._ranks.setdefault(one, [0, 0.0, 0.0])
        self.meetings += 1
        late_us = last_us - before_us
        if late_us <= tolerance_us:
            self.ties += 1
            return
        entry = self._ranks[rank]
        entry[0] += 1
        entry[1] += late_us
        entry[2] = max(entry[2], late_us)

    def straggler(self, span_us: float) -> int | None:
        """Return the rank that the others wait for, or None where nobody stands out.

        It stands out if more of the lateness is its own than chance and one other rank explain,
        (1 + 1/n) / 2 of it for n ranks, if that lateness is at least 1 % of the time, and if it
        was last in at least 1/n of the meetings: one long pause makes no straggler.

        Args:
            span_us: The time that was looked at.
        """
        total_us = sum(entry[1] for entry in self._ranks.values())
        if not total_us or span_us <= 0:
            return None
        rank, (last, sum_us, _) = max(self._ranks.items(), key=lambda item: item[1][1])
        ranks = len(self._ranks)
        stands_out = sum_us > (1 + 1 / ranks) / 2 * total_us and last * ranks >= self.meetings
        return rank if stands_out and sum_us >= _WORTH_NAMING * span_us else None

    def summarize(self, span_us: float) -> dict[str, Any]:
        """Return meetings, ties, the straggler and a row for each rank, times in seconds."""
        rows = [
            {
                "rank": rank,
                "last": int(count),
                "mean_late_s": sum_us / count / 1e6 if count else 0.0,
                "max_late_s": max_us / 1e6,
                "sum_late_s": sum_us / 1e6,
            }
            for rank, (count, sum_us, max_us) in sorted(self._ranks.items())
        ]
        return {
            "meetings": self.meetings,
            "ties": self.ties,
            "straggler": self.straggler(span_us),
            "ranks": rows,
        }
