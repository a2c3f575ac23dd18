"""The sections of ``hvdkit bench converge``: accuracy over samples and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hvdkit.results.report.numbers import join, show
from hvdkit.results.report.parts import Chart, Line, LineChart, Named, Section, Table

__all__ = ["describe_convergence"]

_AXES = {"samples_seen": "samples trained on", "time_s": "time (s)"}


def describe_convergence(results: Sequence[Named]) -> list[Section]:
    """Return a section for each task.

    Args:
        results: Of the driver converge.
    """
    tasks = dict.fromkeys(run["task"] for named in results for run in named.summary["runs"])
    return [_describe_task(task, results) for task in tasks]


def _describe_task(task: str, results: Sequence[Named]) -> Section:
    lines: dict[str, list[Line]] = {metric: [] for metric in _AXES}
    rows = []
    targets = {}
    several = len(results) > 1
    for named in results:
        name = named.name if several else ""
        runs = [run for run in named.summary["runs"] if run["task"] == task]
        if runs:
            targets[named.name] = named.summary["target"].get(task)
        rows += [(*([name] if several else []), *_make_row(run)) for run in runs]
        for labels, curves in _find_curves(named, task):
            title = join(name, labels.get("framework"), _name_variant(labels))
            for metric in _AXES:
                if metric in curves:
                    lines[metric].append(_draw(title, curves[metric], curves["accuracy"]))
    levels = {target for target in targets.values() if target is not None}
    level = ("target", levels.pop()) if len(levels) == 1 else None
    charts: list[Chart] = [
        LineChart(
            f"{task}: accuracy over {what.split(' (')[0]}",
            what,
            "accuracy, held out",
            lines[metric],
            x_axis="linear",
            y_axis="share",
            level=level,
        )
        for metric, what in _AXES.items()
        if lines[metric]
    ]
    headings = ["framework", "batch rule", "rate rule", "workers", "global batch"]
    headings += ["reached", "samples", "time (s)", "final accuracy"]
    headings = [*(["file"] if several else []), *headings]
    wanted = ", ".join(f"{value:g}" for value in sorted(set(targets.values()) - {None}))
    title = f"{task}: to an accuracy of {wanted}; medians over seeds"
    tables = [Table(title, headings, rows, len(headings) - 6)]
    if lines["samples_seen"]:
        tables.append(_tabulate_curves(task, lines["samples_seen"]))
    note = (
        "A fixed batch is divided among the workers and must give the same curve; a scaled one "
        "grows with them, and the learning rate by its rule. Lines are medians over seeds, bands "
        "reach from the lowest seed to the highest. Evaluating is not counted as time."
    )
    return Section(f"Convergence, {task}", charts, tables, [note])


def _find_curves(named: Named, task: str) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Return labels, and by metric the samples as [seed][evaluation], of each variant."""
    found: dict[tuple[Any, ...], tuple[Mapping[str, Any], dict[str, Any]]] = {}
    for series in named.result["series"]:
        labels = series["labels"]
        if labels.get("task") == task:
            _, curves = found.setdefault(tuple(labels.items()), (labels, {}))
            curves[series["metric"]] = [ranks[0] for ranks in series["samples"]]
    return [(labels, curves) for labels, curves in found.values() if "accuracy" in curves]


def _name_variant(labels: Mapping[str, Any]) -> str:
    rule = "same batch"
    if labels.get("batch_rule") != "fixed":
        rule = f"{labels.get('batch_rule')} batch, rate {labels.get('learning_rate_rule')}"
    return f"{labels.get('workers')} w., {rule}"


def _draw(name: str, xs: Sequence[Sequence[float]], accuracies: Sequence[Sequence[float]]) -> Line:
    columns = list(zip(*accuracies, strict=False))
    places = [median(column) for column in zip(*xs, strict=False)]
    # Seeds that were evaluated more often than others: up to where all were.
    columns, places = columns[: len(places)], places[: len(columns)]
    band = [min(column) for column in columns], [max(column) for column in columns]
    return Line(name, places, [median(column) for column in columns], band)


def _make_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        run["framework"],
        run["batch_rule"],
        run["learning_rate_rule"],
        str(run["workers"]),
        str(run["global_batch"]),
        f"{run['reached']} of {run['seeds']}",
        show(run["samples_to_target"]),
        show(run["time_to_target_s"]),
        f"{run['final_accuracy']:.3f}",
    )


def _tabulate_curves(task: str, lines: Sequence[Line]) -> Table:
    places = sorted({x for line in lines for x in line.xs})
    curves = [dict(zip(line.xs, line.ys, strict=True)) for line in lines]
    rows = [
        (show(x), *("" if x not in curve else f"{curve[x]:.3f}" for curve in curves))
        for x in places
    ]
    headings = ["samples", *(line.name for line in lines)]
    return Table(f"{task}: median accuracy by samples trained on", headings, rows, folded=True)
