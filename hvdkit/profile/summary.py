"""What a run's timeline and traces come to.

``summarize`` returns a dictionary; all durations are seconds, all shares lie between 0 and 1:

- ``workers``: number of ranks, None where nothing tells.
- ``span_s``, ``operations``, ``unfinished`` (operations that the end of the file cut off).
- ``steps``: ``count`` (without the first and the last), ``by`` (``rank 0's trace`` or
  ``recurrence``, see ``hvdkit.profile.timeline.Timeline``), and ``phases``: by name the
  ``median_s``, ``p95_s`` and ``share`` of all steps. ``step`` lasts as long as its slowest rank;
  ``backward``, ``wait`` and ``update`` are means over the ranks, from their traces.
  ``negotiation``, ``queue``, ``copy``, ``transfer`` and ``operations`` (any of the last two) come
  from the timeline: the time in which at least one tensor was in that phase. They overlap.
- ``hidden``: None without traces of waits. ``share``: 1 - the time that ranks waited while their
  reductions were carried out / the time that these took. A step's ``exchange_s`` (reductions
  carried out), ``exposed_s`` (of it, with the rank waiting) and ``waited_for_ranks_s`` (waits while
  none was carried out: for slower ranks, for negotiation). Means over the ranks; ``ranks`` has them
  for each.
- ``gaps``: ``share`` of the steps' time in which no operation was carried out.
- ``stragglers``: ``negotiations``: who came last, as rank 0 heard of it; of ``total`` negotiations
  in steps, or in the whole run where there are no steps. ``waits``: who came last to wait, by the
  traces; None without. Each as ``hvdkit.profile.stragglers.Lateness`` summarizes it.
- ``tensors``: the ten with the most time from the first rank's request to the result:
  ``name``, ``kind``, ``size_bytes``, ``count``, ``total_s`` (mean), and by phase ``mean_s``,
  ``p95_s`` and ``max_s``. ``tensors_in_all``: how many names there are.
- ``notes``: what to know before reading the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.profile.merged import MergedTrace
from hvdkit.profile.ranks import SPANS, Overlap, RankTrace, Steps, compare_ranks, find_traces
from hvdkit.profile.records import Damage, read_records
from hvdkit.profile.stragglers import Lateness
from hvdkit.profile.timeline import PHASES, Tensor, Timeline
from hvdkit.results.files import make_series
from hvdkit.trace import TRACED

__all__ = ["Profile", "summarize"]

WORST = 10
_HEAD = 10  # the start of the timeline stands in its first records


class Profile:
    """A run: its ``summary``, and the ``series`` of a result."""

    def __init__(self, summary: dict[str, Any], series: list[dict[str, Any]]) -> None:
        self.summary = summary
        self.series = series


def summarize(
    path: Path,
    *,
    workers: int | None = None,
    trace: Path | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Profile:
    """Summarize a timeline and the traces of ranks beside it (``rank-N.jsonl``).

    Memory does not grow with the file.

    Args:
        path: The timeline, of Horovod's rank 0.
        workers: Number of ranks where it is known.
        trace: Where to write the merged trace, if anywhere.
        progress: Called now and then with the bytes that were read since.

    Raises:
        HvdkitError: The file is no timeline of Horovod, or a file cannot be read or written.
    """
    notes: list[str] = []
    epoch_us = _find_epoch(path)
    traces = find_traces(path.parent, epoch_us, notes)
    # find_traces returns none without an epoch.
    start_us = epoch_us or 0.0
    overlaps = [Overlap(one.waits(start_us)) for one in traces]
    exchange_us = 0.0

    def add_exchange(begin: float, end: float) -> None:
        nonlocal exchange_us
        exchange_us += end - begin
        for overlap in overlaps:
            overlap.add(begin, end)

    timeline = Timeline(
        traces[0].boundaries(start_us) if traces else None, TRACED if traces else "", add_exchange
    )
    damage = Damage()
    with ExitStack() as stack:
        merged = stack.enter_context(MergedTrace(trace)) if trace is not None else None
        for record in read_records(path, damage, progress):
            if timeline.feed(record) and merged is not None:
                merged.add(record)
        if not timeline.recognized:
            raise HvdkitError(
                f"{path} is no timeline of Horovod: none of its events is an operation of "
                "Horovod's; name the file that HOROVOD_TIMELINE was set to"
            )
        if merged is not None:
            merged.add_ranks(traces, start_us)
    steps = compare_ranks(traces, start_us) if traces else None
    if traces:
        workers = traces[0].header["size"]
    _explain(timeline, damage, notes)
    if workers != 1:
        _explain_ranks(timeline, steps, notes)
    summary = {
        "workers": workers,
        "span_s": _span_us(timeline) / 1e6,
        "operations": timeline.operations,
        "unfinished": timeline.unfinished,
        "steps": _summarize_steps(timeline, steps),
        "hidden": _summarize_hidden(timeline, traces, overlaps, exchange_us, steps),
        "gaps": {"share": _find_gaps(timeline)},
        "stragglers": _summarize_stragglers(timeline, steps),
        "tensors": [_describe(tensor) for tensor in _find_worst(timeline)],
        "tensors_in_all": len(timeline.tensors),
        "notes": notes,
    }
    return Profile(summary, _make_series(timeline, steps, workers))


def _find_epoch(path: Path) -> float | None:
    """Return when the timeline began, in microseconds since the epoch."""
    for record in itertools.islice(read_records(path, Damage()), _HEAD):
        arguments = record.get("args")
        if isinstance(arguments, dict):
            epoch_us = arguments.get("start_time_since_epoch_in_micros")
            if isinstance(epoch_us, int):
                return float(epoch_us)
    return None


def _span_us(timeline: Timeline) -> float:
    return timeline.end_us - (timeline.begin_us or 0.0)


def _explain(timeline: Timeline, damage: Damage, notes: list[str]) -> None:
    if damage.truncated:
        notes.append("the file is cut off: everything up to the last whole record is counted")
    if damage.skipped:
        notes.append(f"{damage.skipped} place(s) of the file are no records and are left out")
    if timeline.odd:
        notes.append(f"{timeline.odd} event(s) make no sense where they stand and are left out")
    if timeline.unnamed:
        notes.append("operations without a name are counted as one: give each tensor a name")
    if not timeline.steps.count:
        notes.append("no steps were found: at least three of them are needed")


def _explain_ranks(timeline: Timeline, steps: Steps | None, notes: list[str]) -> None:
    if steps is not None and not _waited(steps):
        notes.append(
            "the ranks traced no waits, so how much communication was hidden is not known: under "
            "TensorFlow they are inside the graph; hvdkit.torch traces them"
        )
    if steps is None:
        notes.append(
            "how much communication was hidden behind the backward pass is not in a timeline: run "
            "the script, with hvdkit.torch, by `hvdkit profile -np N -- COMMAND`"
        )
    lateness, negotiations = _pick_negotiations(timeline)
    unseen = negotiations - lateness.meetings
    if unseen:
        notes.append(
            f"{unseen} of {negotiations} negotiations do not say which rank came last, "
            "since their response was cached: --every-negotiation (HOROVOD_CACHE_CAPACITY=0) "
            "makes all of them say it, and each slower"
        )
    if not timeline.cycles and lateness.meetings:
        notes.append("cycles are not marked: ranks less than 5 ms apart count as equal")


# -- steps ---------------------------------------------------------------------------------


def _summarize_steps(timeline: Timeline, steps: Steps | None) -> dict[str, Any]:
    phases: dict[str, dict[str, float]] = {}
    rows = timeline.steps.rows()
    step_us = timeline.steps_us
    if steps is not None and steps.count:
        ranks = len(steps.sums_us)
        sampled = steps.rows.rows()
        step_us = sum(sums[0] for sums in steps.sums_us) / ranks
        slowest = [max(rank[0] for rank in row) for row in sampled]
        phases["step"] = _spread(slowest, 1.0)
        for place, name in enumerate(SPANS, 1):
            means = [sum(rank[place] for rank in row) / ranks for row in sampled]
            total_us = sum(sums[place] for sums in steps.sums_us) / ranks
            if total_us:
                phases[name] = _spread(means, total_us / step_us)
    elif rows:
        phases["step"] = _spread([row[0] for row in rows], 1.0)
    if rows:
        for place, name in enumerate((*PHASES, "operations")):
            share = timeline.step_sums[place] / timeline.steps_us if timeline.steps_us else 0.0
            phases[name] = _spread([row[1 + place] for row in rows], share)
    by = "recurrence" if steps is None else "rank 0's trace"
    return {"count": timeline.steps.count, "by": by, "phases": phases}


def _spread(values_us: Sequence[float], share: float) -> dict[str, float]:
    ordered = sorted(values_us)
    return {
        "median_s": median(ordered) / 1e6,
        "p95_s": ordered[int(0.95 * (len(ordered) - 1))] / 1e6,
        "share": share,
    }


def _find_gaps(timeline: Timeline) -> float | None:
    """Return the share of the steps in which no operation was carried out."""
    if not timeline.steps_us:
        return None
    return 1 - timeline.step_sums[-1] / timeline.steps_us


def _waited(steps: Steps) -> bool:
    return any(sums[1 + SPANS.index("wait")] for sums in steps.sums_us)


def _summarize_hidden(
    timeline: Timeline,
    traces: Sequence[RankTrace],
    overlaps: Sequence[Overlap],
    exchange_us: float,
    steps: Steps | None,
) -> dict[str, Any] | None:
    count = timeline.steps.count
    if steps is None or not exchange_us or not count or not _waited(steps):
        return None
    ranks = []
    for trace, overlap, sums in zip(traces, overlaps, steps.sums_us, strict=True):
        wait_us = sums[1 + SPANS.index("wait")] / steps.count
        exposed_us = overlap.sum_us / count
        ranks.append(
            {
                "rank": trace.rank,
                "share": 1 - overlap.sum_us / exchange_us,
                "backward_s": sums[1 + SPANS.index("backward")] / steps.count / 1e6,
                "wait_s": wait_us / 1e6,
                "exposed_s": exposed_us / 1e6,
                "waited_for_ranks_s": max(0.0, wait_us - exposed_us) / 1e6,
            }
        )
    means = {
        name: sum(rank[name] for rank in ranks) / len(ranks)
        for name in ("share", "exposed_s", "waited_for_ranks_s")
    }
    return {**means, "exchange_s": exchange_us / count / 1e6, "ranks": ranks}


def _pick_negotiations(timeline: Timeline) -> tuple[Lateness, int]:
    """Return who came last, and the number of negotiations: in steps, or else in the whole run."""
    sphere = int(timeline.negotiations[1] > 0)
    return timeline.lateness[sphere], timeline.negotiations[sphere]


def _summarize_stragglers(timeline: Timeline, steps: Steps | None) -> dict[str, Any]:
    lateness, total = _pick_negotiations(timeline)
    span_us = timeline.steps_us or _span_us(timeline)
    negotiations = {**lateness.summarize(span_us), "total": total}
    waits = None
    if steps is not None and steps.lateness.meetings:
        waits = steps.lateness.summarize(max(sums[0] for sums in steps.sums_us))
    return {"negotiations": negotiations, "waits": waits}


# -- tensors -------------------------------------------------------------------------------


def _find_worst(timeline: Timeline) -> list[Tensor]:
    used = [tensor for tensor in timeline.tensors.values() if tensor.total.count]
    return sorted(used, key=lambda tensor: -tensor.total.sum_us)[:WORST]


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "size_bytes": tensor.size_bytes,
        "count": tensor.total.count,
        "total_s": tensor.total.mean_us() / 1e6,
        "phases": {
            name: {
                "mean_s": durations.mean_us() / 1e6,
                "p95_s": durations.quantile_us(0.95) / 1e6,
                "max_s": durations.max_us / 1e6,
            }
            for name, durations in zip(PHASES, tensor.phases, strict=True)
        },
    }


# -- series --------------------------------------------------------------------------------


def _make_series(
    timeline: Timeline, steps: Steps | None, workers: int | None
) -> list[dict[str, Any]]:
    """Return up to 1000 steps, drawn evenly from all: of ranks, and of the timeline's phases."""
    series = []

    def add(metric: str, ranks: Sequence[Sequence[float]]) -> None:
        samples = [[value / 1e6 for value in rank] for rank in ranks]
        if samples and samples[0]:
            one = make_series(metric, "s", [samples], lower_is_better=True, workers=workers)
            series.append(one)

    if steps is not None:
        rows: Any = steps.rows.rows()
        for place, name in enumerate(("step", *SPANS)):
            columns = [[row[rank][place] for row in rows] for rank in range(len(steps.sums_us))]
            if any(map(any, columns)):
                add(f"{name}_s", columns)
    else:
        add("step_s", [[row[0] for row in timeline.steps.rows()]])
    for place, name in enumerate((*PHASES, "operations"), 1):
        add(f"{name}_s", [[row[place] for row in timeline.steps.rows()]])
    return series
