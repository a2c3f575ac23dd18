"""The sections of ``hvdkit predict``: efficiency and throughput on more workers, with bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.results.report.numbers import join, show, show_ms
from hvdkit.results.report.parts import Chart, Line, LineChart, Named, Section, Table

__all__ = ["describe_forecasts"]


def describe_forecasts(results: Sequence[Named]) -> list[Section]:
    """Return one section, with a line for each result.

    Args:
        results: Of the driver predict.
    """
    several = len(results) > 1
    efficiencies: list[Line] = []
    throughputs: list[Line] = []
    tables: list[Table] = []
    notes = []
    for named in results:
        scaling = named.summary["model"]["scaling"]
        name = join(named.name if several else "", f"predicted, {scaling} scaling")
        points = sorted(named.summary["points"], key=lambda point: point["workers"])
        efficiencies.append(_draw_efficiency(name, points))
        throughputs.append(_draw_throughput(name, points))
        measured = _draw_measured(join(named.name if several else "", "measured"), named, scaling)
        throughputs += [measured] if measured.xs else []
        tables.append(_tabulate(named, points, scaling, several))
        notes += [join(_prefix(named, several) + line) for line in _explain(named)]
    charts: list[Chart] = [
        LineChart(
            "Predicted efficiency, 95 % band",
            "workers",
            "scaling efficiency",
            efficiencies,
            y_axis="share",
        ),
        LineChart(
            "Predicted throughput, 95 % band",
            "workers",
            "samples/s, all workers",
            throughputs,
            y_axis="log",
        ),
    ]
    return [Section("Prediction", charts, tables, notes)]


def _prefix(named: Named, several: bool) -> str:
    return f"{named.name}: " if several else ""


def _draw_efficiency(name: str, points: Sequence[Mapping[str, Any]]) -> Line:
    band = (
        [point["scaling_efficiency_low"] for point in points],
        [point["scaling_efficiency_high"] for point in points],
    )
    xs = [point["workers"] for point in points]
    return Line(name, xs, [point["scaling_efficiency"] for point in points], band)


def _draw_throughput(name: str, points: Sequence[Mapping[str, Any]]) -> Line:
    """Draw samples/s; their band is that of the step time, since they are a batch over it."""
    ys = [point["samples_per_s"] for point in points]
    band = None
    if all("step_time_s_low" in point and "step_time_s_high" in point for point in points):
        steps_s = [point["step_time_s"] for point in points]
        low = [
            y * step_s / point["step_time_s_high"]
            for y, step_s, point in zip(ys, steps_s, points, strict=True)
        ]
        high = [
            y * step_s / point["step_time_s_low"]
            for y, step_s, point in zip(ys, steps_s, points, strict=True)
        ]
        band = low, high
    return Line(name, [point["workers"] for point in points], ys, band)


def _draw_measured(name: str, named: Named, scaling: str) -> Line:
    """Draw what was measured with the batch that is predicted."""
    batch = named.summary["model"]["batch"]
    rows = [
        row
        for row in sorted(named.summary["measured"], key=lambda row: row["workers"])
        if batch == row["samples_per_worker"] * (row["workers"] if scaling == "strong" else 1)
    ]
    ys = [row["workers"] * row["samples_per_worker"] / row["step_time_s"] for row in rows]
    return Line(name, [row["workers"] for row in rows], ys, joined=False)


def _tabulate(
    named: Named, points: Sequence[Mapping[str, Any]], scaling: str, several: bool
) -> Table:
    batch = named.summary["model"]["batch"]
    whose = "each worker" if scaling == "weak" else "all workers together"
    priced = any(point["cost_per_million_samples"] is not None for point in points)
    measured = {row["workers"]: row for row in named.summary["measured"]}
    headings = ["workers", "scaling", "binds", "efficiency, 95 % band", "step (ms)", "samples/s"]
    headings += ["measured step (ms)"] * bool(measured) + ["cost / million samples"] * priced
    rows = []
    for point in points:
        low, high = point["scaling_efficiency_low"], point["scaling_efficiency_high"]
        cells = [
            str(point["workers"]),
            scaling,
            point["binds"],
            f"{point['scaling_efficiency']:.1%} [{low:.1%}, {high:.1%}]",
            show_ms(point["step_time_s"]),
            show(point["samples_per_s"]),
        ]
        row = measured.get(point["workers"])
        if measured:
            same = row is not None and batch == row["samples_per_worker"] * (
                row["workers"] if scaling == "strong" else 1
            )
            cells.append(show_ms(row["step_time_s"]) if row is not None and same else "")
        if priced:
            cells.append(show(point["cost_per_million_samples"]))
        rows.append(cells)
    title = f"{_prefix(named, several)}predicted, {scaling} scaling, a batch of {batch} for {whose}"
    return Table(title[:1].upper() + title[1:] if not several else title, headings, rows, 3)


def _explain(named: Named) -> list[str]:
    summary = named.summary
    rest = "; ".join(f"{what}: {origin}" for what, origin in summary.get("origins", {}).items())
    lines = [f"It rests on {rest}."] if rest else []
    lines += [f"Assumed: {sentence}" for sentence in summary.get("assumptions", ())]
    return lines
