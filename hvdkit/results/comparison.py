"""Whether one result is worse than another: what may be compared, and what the samples say."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from hvdkit.results.statistics import RESAMPLES, Interval

__all__ = [
    "CONFIDENCE",
    "MIN_ROUNDS",
    "Comparison",
    "Verdict",
    "compare_results",
    "find_machine_mismatches",
    "find_mismatches",
]

Verdict = Literal["fine", "faster", "regression", "not enough data", "pace"]

# Of the machine; what hvdkit and Horovod themselves are is what people compare.
_MACHINE = ("processor", "cores", "accelerators", "python")
_FREE_VERSIONS = {"hvdkit", "horovod"}
MIN_ROUNDS = 5
# A regression must be likely, beside being larger than what is tolerated: one side of 90 %.
CONFIDENCE = 0.8
CONTROL = "single"


@dataclass(frozen=True)
class Comparison:
    """One series of two results.

    Attributes:
        metric: What was measured.
        labels: What it was measured of.
        before: The first result's median over rounds.
        after: The second one's.
        ratio: Cost of the second over the first; above 1 it is worse, whichever way the metric
            counts. Where both results have the candidate "single" beside this one, of the costs
            relative to it in the same rounds.
        verdict: What follows from it; "pace" for "single" where others are held against it.
    """

    metric: str
    labels: Mapping[str, Any]
    before: float
    after: float
    ratio: Interval
    verdict: Verdict


def find_mismatches(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Say what keeps two results from being compared, a line each; empty when nothing does.

    Args:
        before: A result that was read and checked, as is ``after``.
    """
    if before["driver"] != after["driver"]:
        # Labels of two drivers have little in common: a list of them would hide the reason.
        return [f"driver: {before['driver']} and {after['driver']}"]
    lines = find_machine_mismatches(before, after)
    if not _pair_series(before, after):
        lines += _explain_labels(before, after)
    return lines


def find_machine_mismatches(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Say in what the machines and versions of two results differ, a line each.

    Args:
        before: A result that was read and checked, as is ``after``.
    """
    lines = []
    for name in _MACHINE:
        pair = before["machine"].get(name), after["machine"].get(name)
        if pair[0] != pair[1]:
            lines.append(f"{name}: {pair[0]} and {pair[1]}")
    versions = before["machine"]["versions"], after["machine"]["versions"]
    for name in sorted({*versions[0], *versions[1]} - _FREE_VERSIONS):
        pair = versions[0].get(name, "none"), versions[1].get(name, "none")
        if pair[0] != pair[1]:
            lines.append(f"version of {name}: {pair[0]} and {pair[1]}")
    return lines


def compare_results(
    before: Mapping[str, Any], after: Mapping[str, Any], *, tolerance: float = 0.05
) -> list[Comparison]:
    """Compare the series that both results have; the first result is the reference.

    A series has got worse when its interval lies above 1 and its ratio above ``1 + tolerance``: two
    runs of the same code differ by some percent, in whole runs, which no number of rounds within a
    run can show. On a shared machine it is the pace of the machine that differs, by ten percent
    and more; what was measured in turn with "single", which trains without communication, is
    therefore held against it, round by round. A change that slows both down shows in the row of
    "single" alone. Series with a value that is not positive and finite are left out: they have no
    ratio.

    Args:
        before: A result that was read and checked, as is ``after``.
        tolerance: The share by which a median may be worse.
    """
    comparisons = []
    pairs = _pair_series(before, after)
    controls = {_identify(old): (old, new) for old, new in pairs if _is_control(old)}
    judged = {_identify_control(old) for old, _ in pairs if not _is_control(old)}
    for old, new in pairs:
        costs_before, costs_after = _summarize_rounds(old), _summarize_rounds(new)
        control = None if _is_control(old) else controls.get(_identify_control(old))
        if control is not None:
            costs_before = _divide(costs_before, _summarize_rounds(control[0]))
            costs_after = _divide(costs_after, _summarize_rounds(control[1]))
        if not all(0 < cost < math.inf for cost in costs_before + costs_after):
            continue  # there is no ratio
        ratio = _estimate_ratio(costs_before, costs_after)
        if _is_control(old) and _identify(old) in judged:
            verdict: Verdict = "pace"
        elif min(len(costs_before), len(costs_after)) < MIN_ROUNDS:
            verdict = "not enough data"
        elif ratio.low > 1 and ratio.estimate > 1 + tolerance:
            verdict = "regression"
        elif ratio.high < 1 and ratio.estimate < 1 / (1 + tolerance):
            verdict = "faster"
        else:
            verdict = "fine"
        comparisons.append(
            Comparison(
                old["metric"],
                old["labels"],
                median(_summarize_rounds(old, cost=False)),
                median(_summarize_rounds(new, cost=False)),
                ratio,
                verdict,
            )
        )
    return comparisons


def _pair_series(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    known = {_identify(one): one for one in before["series"]}
    return [(known[_identify(one)], one) for one in after["series"] if _identify(one) in known]


def _identify(series: Mapping[str, Any]) -> tuple[Any, ...]:
    return (series["metric"], *sorted((k, repr(v)) for k, v in series["labels"].items()))


def _is_control(series: Mapping[str, Any]) -> bool:
    return bool(series["labels"].get("candidate") == CONTROL)


def _identify_control(series: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what identifies the series of "single" that took turns with this one."""
    return _identify({**series, "labels": {**series["labels"], "candidate": CONTROL}})


def _divide(costs: Sequence[float], controls: Sequence[float]) -> list[float]:
    """Return costs relative to those of the control in the same rounds."""
    pairs = zip(costs, controls, strict=False)
    return [cost / control if control else 0.0 for cost, control in pairs]


def _explain_labels(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name the labels in which the most similar series differ."""
    best: list[str] | None = None
    for old in before["series"]:
        for new in after["series"]:
            names = {**old["labels"], **new["labels"]}
            pairs = {"metric": (old["metric"], new["metric"])}
            pairs |= {name: (old["labels"].get(name), new["labels"].get(name)) for name in names}
            lines = [f"{name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b]
            if best is None or len(lines) < len(best):
                best = lines
    return best or []


def _summarize_rounds(series: Mapping[str, Any], cost: bool = True) -> list[float]:
    """Return the median of each round, of the slowest rank of each sample.

    Args:
        series: What was measured.
        cost: Turn metrics that are better when higher round, so that more is worse in all.
    """
    lower = series["lower_is_better"]
    worst = max if lower else min
    rounds = [median(map(worst, zip(*ranks, strict=False))) for ranks in series["samples"]]
    return rounds if lower or not cost else [1 / value if value else 0.0 for value in rounds]


def _estimate_ratio(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Interval:
    """Return the ratio of two interquartile means, with a percentile bootstrap interval.

    The two runs share no rounds, so each is resampled by itself. The mean of the middle half is
    steadier than the median, and as deaf to a round in which the machine did something else.

    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    rng = random.Random(seed)
    replicates = sorted(
        _average_middle(rng.choices(after, k=len(after)))
        / _average_middle(rng.choices(before, k=len(before)))
        for _ in range(RESAMPLES)
    )
    tail = (1 - CONFIDENCE) / 2
    return Interval(
        estimate=_average_middle(after) / _average_middle(before),
        low=replicates[math.floor(tail * (RESAMPLES - 1))],
        high=replicates[math.ceil((1 - tail) * (RESAMPLES - 1))],
    )


def _average_middle(values: Sequence[float]) -> float:
    cut = len(values) // 4
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)
