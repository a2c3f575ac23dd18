"""The sections of ``hvdkit bench train``: throughput, efficiency, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.results.report.numbers import join, show, show_interval, show_ms, show_share
from hvdkit.results.report.parts import BarChart, Chart, Line, LineChart, Named, Section, Table

__all__ = ["describe_training"]

OWN = "hvdkit"
# Runs that are equal in these are drawn together.
_CONDITIONS = (
    "framework", "model", "scaling", "threads", "dtype", "input", "accumulate", "compression",
    "bucket_size_mb",
)  # fmt: skip
_UNKNOWN = "computing and communication, not told apart"

Run = Mapping[str, Any]


def describe_training(results: Sequence[Named]) -> list[Section]:
    """Return a section for each model and set of conditions, and one for the means over models.

    Args:
        results: Of the driver train.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Run]]] = {}
    for named in results:
        for run in named.summary["runs"]:
            batch = run["batch"] if run["scaling"] == "weak" else run["global_batch"]
            key = (*(run.get(name) for name in _CONDITIONS), batch)
            groups.setdefault(key, []).append((_name(named, results), run))
    sections = [_describe_group(runs, results) for runs in groups.values()]
    means = [
        (_name(named, results), {**mean, "model": "geometric mean"})
        for named in results
        for mean in named.summary.get("geometric_means", ())
    ]
    table = _tabulate_ratios(means, "Step time over the models")
    return [*sections, *([Section("All models", tables=[table])] if table.rows else [])]


def _name(named: Named, results: Sequence[Named]) -> str:
    return named.name if len(results) > 1 else ""


def _describe_group(runs: Sequence[tuple[str, Run]], results: Sequence[Named]) -> Section:
    files = {name for name, _ in runs}
    first = runs[0][1]
    scaling = f"{first['scaling']} scaling"
    batch = f"{first['batch']} a worker a pass"
    if first["scaling"] == "strong":
        batch = f"{first['global_batch']} a step in all"
    title = f"{first['model']} ({first['framework']}): {scaling}, batch {batch}"
    if len(files) == 1:  # one place is enough to name it
        title, runs = join(title, *files), [("", run) for _, run in runs]
    titles = [f"{what}, {first['model']}, {scaling}" for what in ("Throughput", "Efficiency")]
    charts: list[Chart] = [
        LineChart(titles[0], "workers", "samples/s, all workers", _draw(runs, _get_throughput))
    ]
    lines = [line for line in _draw(runs, _get_efficiency) if len(line.xs) > 1]
    if lines:
        charts.append(LineChart(titles[1], "workers", "scaling efficiency", lines, y_axis="share"))
    charts.append(_draw_breakdown(runs, f"A step's time, {first['model']}, {scaling}"))
    ratios = [
        (_name(named, results) if len(files) > 1 else "", one)
        for named in results
        if _name(named, results) in files
        for one in named.summary["ratios"]
        if one["model"] == first["model"]
    ]
    tables = [_tabulate_runs(runs, f"Training {first['model']}, {scaling}, batch {batch}")]
    table = _tabulate_ratios(ratios, f"Step time, {first['model']}, {scaling}")
    return Section(title, charts, [*tables, *([table] if table.rows else [])], _explain(runs))


def _explain(runs: Sequence[tuple[str, Run]]) -> list[str]:
    first = runs[0][1]
    also = f", gradients sent as {first['compression']}" * (first["compression"] != "none")
    also += f", {first['accumulate']} passes a step" * (first["accumulate"] > 1)
    notes = [
        f"{first['dtype']}, {first['threads']} thread(s) a worker, {first['input']} input{also}. A "
        "step lasts as long as its slowest rank; samples/s are those of all workers together. "
        "Exposed communication is what a step takes beyond that of single, which does all but "
        "communicate."
    ]
    if any((run["communication_share"] or 0) < 0 for _, run in runs):
        notes.append("Where a step was shorter than that of single, its communication counts as 0.")
    return notes


def _get_throughput(run: Run, fewest: int) -> float:
    value: float = run["samples_per_s"]
    return value


def _get_efficiency(run: Run, fewest: int) -> float | None:
    # What efficiency is relative to has none of its own.
    return 1.0 if run["workers"] == fewest else run["scaling_efficiency"]


def _draw(runs: Sequence[tuple[str, Run]], get: Any) -> list[Line]:
    found: dict[tuple[str, str], list[Run]] = {}
    for name, run in runs:
        found.setdefault((name, run["candidate"]), []).append(run)
    lines = []
    for (name, candidate), chosen in found.items():
        ordered = sorted(chosen, key=lambda run: run["workers"])
        points = [(run["workers"], get(run, ordered[0]["workers"])) for run in ordered]
        known = [(x, y) for x, y in points if y is not None]
        lines.append(Line(join(name, candidate), [x for x, _ in known], [y for _, y in known]))
    return [line for line in lines if line.xs]


def _draw_breakdown(runs: Sequence[tuple[str, Run]], title: str) -> BarChart:
    names = ("computing", "exposed communication", "input wait", _UNKNOWN)
    parts: dict[str, list[float | None]] = {name: [] for name in names}
    rows = []
    for name, run in sorted(runs, key=lambda one: one[1]["workers"]):
        rows.append(join(name, run["candidate"], f"{run['workers']} w."))
        for part, time_s in _split_step(run).items():
            parts[part].append(None if time_s is None else 1e3 * time_s)
    parts = {name: values for name, values in parts.items() if any(values)}
    return BarChart(title, "ms, median step (w.: workers)", rows, parts)


def _split_step(run: Run) -> dict[str, float | None]:
    """Divide a step into parts that add up to it, in seconds."""
    step_s = run["step_time_s"]
    input_s = min(step_s, (run["input_share"] or 0) * step_s)
    share = run["communication_share"]
    unknown = share is None and run["workers"] > 1 and run["candidate"] != "single"
    communication_s = min(step_s - input_s, max(0, share or 0) * step_s)
    rest_s = step_s - input_s - communication_s
    return {
        "computing": None if unknown else rest_s,
        "exposed communication": None if unknown else communication_s,
        "input wait": input_s,
        _UNKNOWN: rest_s if unknown else None,
    }


def _tabulate_runs(runs: Sequence[tuple[str, Run]], title: str) -> Table:
    columns: dict[str, Any] = {
        "file": lambda name, run: name,
        "candidate": lambda name, run: run["candidate"],
        "scaling": lambda name, run: run["scaling"],
        "workers": lambda name, run: str(run["workers"]),
        "samples/s": lambda name, run: show(run["samples_per_s"]),
        "efficiency": lambda name, run: show_share(run["scaling_efficiency"]),
        "step (ms)": lambda name, run: show_ms(run["step_time_s"]),
        "p95 (ms)": lambda name, run: show_ms(run["step_time_p95_s"]),
        "slowest / fastest rank": lambda name, run: f"{run['rank_spread']:.2f}",
        "communication": lambda name, run: show_share(run["communication_share"]),
        "input wait": lambda name, run: show_share(run["input_share"]),
        "peak memory (MiB)": lambda name, run: (
            "" if run["peak_memory_bytes"] is None else show(run["peak_memory_bytes"] / 2**20)
        ),
        "cost / million samples": lambda name, run: show(run["cost_per_million_samples"]),
    }
    cells = {what: [get(name, run) for name, run in runs] for what, get in columns.items()}
    cells = {what: column for what, column in cells.items() if any(column)}
    names = 3 if "file" in cells else 2
    return Table(title, list(cells), list(zip(*cells.values(), strict=True)), names)


def _tabulate_ratios(ratios: Sequence[tuple[str, Mapping[str, Any]]], title: str) -> Table:
    own = [one for one in ratios if one[1]["candidate"] == OWN] or list(ratios)
    with_file = any(name for name, _ in own)
    rows = [
        (
            *([name] if with_file else []),
            f"{one['candidate']} / {one['reference']}",
            str(one["workers"]),
            show_interval(one),
        )
        for name, one in own
    ]
    headings = [*(["file"] if with_file else []), "of", "workers", "ratio, 95 % interval"]
    return Table(f"{title}: ratios (below 1: faster)", headings, rows, len(headings) - 2)
