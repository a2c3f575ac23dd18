"""The traces that ranks wrote of their steps (``hvdkit.trace``), on one time base."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.profile.sketch import Reservoir
from hvdkit.profile.stragglers import Lateness
from hvdkit.trace import FORMAT

__all__ = ["SPANS", "Overlap", "RankTrace", "Steps", "compare_ranks", "find_traces"]

SPANS = ("backward", "wait", "update")
# The traces of a run begin with its training at the latest; long after the timeline is another run.
_MOST_LATE_US = 3600e6
_MOST_ROWS = 100_000


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace.

    Attributes:
        path: The file, which is read anew for each purpose: it may be large.
        header: Its first line.
        shift_us: Added to the rank's clock it gives microseconds since the epoch on rank 0's clock.
    """

    path: Path
    header: dict[str, Any]
    shift_us: float

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.header["rank"])

    def steps(self, epoch_us: float) -> Iterator[dict[str, Any]]:
        """Yield the steps, times in microseconds after ``epoch_us``.

        The trace of a killed worker ends with the last whole line.
        """
        shift_us = self.shift_us - epoch_us
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            next(lines)
            for line in lines:
                try:
                    step = json.loads(line)
                    spans = [(n, at + shift_us, float(length)) for n, at, length in step["spans"]]
                    begin, end = step["begin"] + shift_us, step["end"] + shift_us
                    number = int(step["step"])
                except (ValueError, KeyError, TypeError):
                    return
                yield {"step": number, "begin": begin, "end": end, "spans": spans}

    def boundaries(self, epoch_us: float) -> Iterator[float]:
        """Yield the begin of the first step and the end of each."""
        for index, step in enumerate(self.steps(epoch_us)):
            if index == 0:
                yield step["begin"]
            yield step["end"]

    def waits(self, epoch_us: float) -> Iterator[tuple[float, float]]:
        """Yield begin and end of each wait."""
        for step in self.steps(epoch_us):
            for name, begin, length in step["spans"]:
                if name == "wait":
                    yield begin, begin + length


def find_traces(folder: Path, epoch_us: float | None, notes: list[str]) -> list[RankTrace]:
    """Return the traces of all ranks that lie beside a timeline, in the order of the ranks.

    Args:
        folder: Where the timeline is.
        epoch_us: When the timeline began; None if it does not say.
        notes: Is told why traces are left out.
    """
    traces = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        header = _read_header(path)
        if header is None:
            notes.append(f"{path.name} has no header and is left out")
            continue
        traces[header["rank"]] = header, path
    if not traces:
        return []
    if 0 not in traces or epoch_us is None:
        notes.append("the traces of the ranks are left out: that of rank 0 or its clock is missing")
        return []
    root, _ = traces[0]
    root_shift = root["epoch_minus_clock_us"]
    if not -1e6 <= root["started_us"] + root_shift - epoch_us <= _MOST_LATE_US:
        notes.append("the traces of the ranks are left out: they are of another run")
        return []
    missing = sorted(set(range(root["size"])) - set(traces))
    if missing:
        notes.append(
            f"no trace of rank {', '.join(map(str, missing))}: does every host have {folder}?"
        )
    return [
        RankTrace(path, header, root_shift - header["clock_offset_us"])
        for rank, (header, path) in sorted(traces.items())
        if header["size"] == root["size"] and rank < root["size"]
    ]


def _read_header(path: Path) -> dict[str, Any] | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            header = json.loads(next(lines, ""))
        if header["hvdkit_trace"] != FORMAT:
            raise HvdkitError(
                f"{path} has format {header['hvdkit_trace']}, and this hvdkit reads {FORMAT}: "
                "profile again"
            )
        numbers = ("rank", "size", "clock_offset_us", "clock_error_us", "epoch_minus_clock_us")
        if all(isinstance(header[name], int | float) for name in (*numbers, "started_us")):
            return dict(header)
    except OSError as error:
        raise HvdkitError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        pass
    return None


class Overlap:
    """How much of some times falls into others; both come in order and none overlap their own.

    Args:
        times: Begin and end of each of the others.
    """

    def __init__(self, times: Iterable[tuple[float, float]]) -> None:
        self.sum_us = 0.0
        self._times = iter(times)
        self._current = next(self._times, None)

    def add(self, begin: float, end: float) -> None:
        """Add what of ``begin`` to ``end`` falls into the others."""
        while (current := self._current) is not None and current[0] < end:
            self.sum_us += max(0.0, min(end, current[1]) - max(begin, current[0]))
            if current[1] > end:
                return
            self._current = next(self._times, None)


class Steps:
    """What steps come to, of all ranks in step; the first one is left out.

    Attributes:
        count: Steps that every rank has traced.
        rows: A sample of them, each [rank] of (step, *SPANS) in microseconds.
        sums_us: [rank][step, *SPANS].
        lateness: Who was last to begin to wait for the others.
    """

    def __init__(self, ranks: int) -> None:
        self.count = 0
        self.rows = Reservoir(max(100, min(1000, _MOST_ROWS // ranks)))
        self.sums_us = [[0.0] * (1 + len(SPANS)) for _ in range(ranks)]
        self.lateness = Lateness()


def compare_ranks(traces: list[RankTrace], epoch_us: float) -> Steps:
    """Read all traces side by side, up to the shortest.

    A rank begins to wait when its backward pass is over. Who does so last made the others wait. Of
    several waits in a step the first one counts: after it the ranks are even.
    """
    steps = Steps(len(traces))
    tolerance_us = sum(sorted(trace.header["clock_error_us"] for trace in traces)[-2:])
    for index, ranks in enumerate(zip(*(trace.steps(epoch_us) for trace in traces), strict=False)):
        if index == 0:
            continue
        row = []
        arrivals = []
        for trace, step in zip(traces, ranks, strict=True):
            spent = dict.fromkeys(SPANS, 0.0)
            arrival = None
            for name, begin, length in step["spans"]:
                spent[name] = spent.get(name, 0.0) + length
                if name == "wait" and arrival is None:
                    arrival = begin
            if arrival is not None:
                arrivals.append((arrival, trace.rank))
            row.append((step["end"] - step["begin"], *(spent[name] for name in SPANS)))
        steps.count += 1
        steps.rows.add(row)
        for sums, values in zip(steps.sums_us, row, strict=True):
            for place, value in enumerate(values):
                sums[place] += value
        if len(arrivals) == len(traces) > 1:
            steps.lateness.add(arrivals, tolerance_us)
    return steps
