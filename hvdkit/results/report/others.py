"""What holds for every driver: results that no section knows, and what changed between files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hvdkit.results.comparison import CONFIDENCE, MIN_ROUNDS, compare_results
from hvdkit.results.report.numbers import show
from hvdkit.results.report.parts import Named, Section, Table

__all__ = ["describe_changes", "describe_samples"]


def describe_samples(results: Sequence[Named]) -> list[Section]:
    """Return a section for each result, with the median of each series.

    Args:
        results: Of drivers that this hvdkit does not know.
    """
    sections = []
    for named in results:
        rows = []
        differing = _find_differing([series["labels"] for series in named.result["series"]])
        for series in named.result["series"]:
            samples = [one for ranks in series["samples"] for rank in ranks for one in rank]
            what = _write_labels(series["labels"], differing)
            rows.append((series["metric"], what, series["unit"], show(median(samples))))
        title = f"{named.result['driver']}: medians of all samples"
        table = Table(title, ["metric", "of", "unit", "median"], rows, 3)
        note = (
            "This hvdkit does not know the driver that wrote this, so only its samples are shown."
        )
        sections.append(Section(named.name, tables=[table], notes=[note]))
    return sections


def describe_changes(results: Sequence[Named]) -> list[Section]:
    """Return a section for each result after the first: its cost over that of the first.

    Args:
        results: Of one driver.
    """
    first, *others = results
    sections = []
    for named in others:
        comparisons = compare_results(first.result, named.result)
        differing = _find_differing([one.labels for one in comparisons])
        rows = [
            (
                one.metric,
                _write_labels(one.labels, differing),
                show(one.before),
                show(one.after),
                f"{one.ratio.estimate:.3f} [{one.ratio.low:.3f}, {one.ratio.high:.3f}]",
                one.verdict,
            )
            for one in comparisons
        ]
        if not comparisons:
            continue  # they measured different things
        enough = all(one.verdict != "not enough data" for one in comparisons)
        interval = f"ratio, {100 * CONFIDENCE:.0f} % interval"
        headings = ["metric", "of", first.name, named.name, interval, "verdict"]
        what = f"{named.name} over {first.name}"
        table = Table(f"Cost of {what} (above 1: worse)", headings, rows, 2)
        note = (
            "Candidates are held against single, which took turns with them, where it was measured."
            if enough
            else f"Not enough data: at least {MIN_ROUNDS} rounds are needed in each result."
        )
        sections.append(Section(what, tables=[table] if enough else [], notes=[note]))
    return sections


def _find_differing(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names in which labels differ: what is the same in all is not worth a cell."""
    names = dict.fromkeys(name for one in labels for name in one)
    return [name for name in names if len({repr(one.get(name)) for one in labels}) > 1]


def _write_labels(labels: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {labels[name]}" for name in names if labels.get(name) is not None)
