"""The sections of ``hvdkit profile``: where a step's time goes, by phase, rank and tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.results.report.numbers import join, show, show_ms, show_share, show_size
from hvdkit.results.report.parts import BarChart, Named, Section, Table

__all__ = ["describe_profiles"]

# In the order in which they are shown; others follow.
_PHASES = (
    "step", "backward", "wait", "update", "negotiation", "queue", "copy", "transfer", "operations",
)  # fmt: skip
_LABELS = {
    "step": "step, slowest rank",
    "wait": "wait for reductions",
    "operations": "copy or transfer",
}

Run = Mapping[str, Any]


def describe_profiles(results: Sequence[Named]) -> list[Section]:
    """Return one section, with the runs of all results side by side.

    Args:
        results: Of the driver profile.
    """
    runs: dict[str, Run] = {}
    for named in results:
        for run in named.summary["runs"]:
            workers = f"{run['workers']} worker(s)" if run["workers"] else "timeline"
            title = join(named.name if len(results) > 1 else "", workers)
            runs[title if title not in runs else f"{title} ({len(runs) + 1})"] = run
    found = {phase for run in runs.values() for phase in run["steps"]["phases"]}
    phases = [name for name in _PHASES if name in found] + sorted(found - {*_PHASES})
    charts = []
    tables = []
    if phases:
        charts.append(_draw(runs, phases))
        tables.append(_tabulate_phases(runs, phases))
    hidden = _tabulate_hidden(runs)
    tables += [hidden] if hidden.rows else []
    stragglers = _tabulate_stragglers(runs)
    tables += [stragglers] if stragglers.rows else []
    tables += [_tabulate_tensors(title, run) for title, run in runs.items() if run["tensors"]]
    notes = [f"{title}: {note}." for title, run in runs.items() for note in run["notes"]]
    return [Section("Profile", charts, tables, [*_find_stragglers(runs), *notes])]


def _draw(runs: Mapping[str, Run], phases: Sequence[str]) -> BarChart:
    parts = {
        title: [
            None if (phase := run["steps"]["phases"].get(name)) is None else 1e3 * phase["median_s"]
            for name in phases
        ]
        for title, run in runs.items()
    }
    names = [_LABELS.get(name, name) for name in phases]
    return BarChart("Phases of a step (they overlap)", "ms, median", names, parts, stacked=False)


def _tabulate_phases(runs: Mapping[str, Run], phases: Sequence[str]) -> Table:
    rows = []
    for name in phases:
        cells = [_LABELS.get(name, name)]
        for run in runs.values():
            phase = run["steps"]["phases"].get(name)
            if phase is None:
                cells += ["", "", ""]
            else:
                spread = show_ms(phase["median_s"]), show_ms(phase["p95_s"])
                cells += [*spread, show_share(phase["share"])]
        rows.append(cells)
    headings = ["phase"]
    for title in runs:
        headings += [f"{title}: median (ms)", "p95 (ms)", "share"]
    return Table("Phases of a step, and their share of all steps (they overlap)", headings, rows)


def _tabulate_hidden(runs: Mapping[str, Run]) -> Table:
    rows = [
        (
            title,
            show_ms(hidden["exchange_s"]),
            show_share(hidden["share"]),
            show_ms(hidden["exposed_s"]),
            show_ms(hidden["waited_for_ranks_s"]),
        )
        for title, run in runs.items()
        if (hidden := run["hidden"]) is not None
    ]
    headings = ["run", "reductions (ms)", "hidden", "waited for them (ms)"]
    headings.append("waited for ranks and negotiation (ms)")
    return Table("Communication behind the backward pass, means of a step", headings, rows)


def _tabulate_stragglers(runs: Mapping[str, Run]) -> Table:
    rows = []
    for title, run in runs.items():
        for kind in ("waits", "negotiations"):
            found = run["stragglers"][kind]
            if found is None or not found["meetings"]:
                continue
            what = "steps" if kind == "waits" else kind
            rows += [
                (
                    title,
                    f"{found['meetings']} {what}",
                    str(rank["rank"]),
                    str(rank["last"]),
                    show_ms(rank["mean_late_s"]),
                    show_ms(rank["max_late_s"]),
                )
                for rank in found["ranks"]
            ]
    headings = ["run", "in", "rank", "came last", "late, mean (ms)", "late, most (ms)"]
    return Table("Who came last", headings, rows, 2)


def _find_stragglers(runs: Mapping[str, Run]) -> list[str]:
    lines = []
    for title, run in runs.items():
        ranks = {
            found["straggler"]
            for kind in ("waits", "negotiations")
            if (found := run["stragglers"][kind]) is not None and found["straggler"] is not None
        }
        lines += [f"{title}: rank {rank} is the straggler." for rank in sorted(ranks)]
    return lines


def _tabulate_tensors(title: str, run: Run) -> Table:
    phases = dict.fromkeys(name for tensor in run["tensors"] for name in tensor["phases"])
    rows = [
        (
            tensor["name"],
            "" if tensor["size_bytes"] is None else show_size(tensor["size_bytes"]),
            show(tensor["count"]),
            show_ms(tensor["total_s"]),
            *(
                show_ms(tensor["phases"][name]["mean_s"]) if name in tensor["phases"] else ""
                for name in phases
            ),
        )
        for tensor in run["tensors"]
    ]
    headings = ["tensor", "size", "times", "in all (ms)", *(f"{name} (ms)" for name in phases)]
    what = f"{title}: the {len(rows)} tensors with the most time, of {run['tensors_in_all']}; means"
    return Table(what, headings, rows, folded=True)
