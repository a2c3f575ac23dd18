"""Average what ranks measured, each on its own share of the data; framework-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.agreement import Gather, format_ranks
from hvdkit.errors import HvdkitError, RankDisagreementError

__all__ = ["average_metrics"]


def average_metrics(
    metrics: Mapping[str, Any], count: float | None, *, gather: Gather, ranks: Sequence[int]
) -> dict[str, float]:
    """Average named numbers over the ranks, weighted by sample count where one is given.

    Collective: every one of ``ranks`` must call.

    Args:
        metrics: Names and what ``float`` takes; the same names on every rank.
        count: How many samples this rank's values are means over; None on all ranks gives the
            plain mean over ranks.
        gather: See ``hvdkit.agreement``.
        ranks: The ranks to average over.

    Returns:
        The means as floats, in the order of ``metrics``; NaN where no rank has a sample.

    Raises:
        RankDisagreementError: On every rank, if names differ, or only some ranks give a count.
        HvdkitError: On every rank, if a value is no number or a count is negative.
    """
    report: tuple[str | None, dict[str, float], float | None]
    try:
        report = (None, *_read(metrics, count))
    except HvdkitError as error:
        report = (str(error), {}, None)
    reports = gather(report, "average_metrics")
    for rank, (problem, _, _) in zip(ranks, reports, strict=True):
        if problem is not None:
            raise HvdkitError(f"average_metrics: rank {rank}: {problem}")
    _demand_same(ranks, [sorted(values) for _, values, _ in reports], "names of metrics")
    counted = [weight is not None for _, _, weight in reports]
    _demand_same(ranks, ["a count" if c else "no count" for c in counted], "use of count")
    weights = [1.0 if weight is None else weight for _, _, weight in reports]
    return {key: _mean([values[key] for _, values, _ in reports], weights) for key in metrics}


def _read(metrics: Mapping[str, Any], count: float | None) -> tuple[dict[str, float], float | None]:
    values = {}
    for key, value in metrics.items():
        try:
            values[key] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise HvdkitError(
                f"metric {key!r} is no number ({error}); pass a float or a tensor of one element"
            ) from error
    if count is None:
        return values, None
    weight = float(count)
    if not 0 <= weight < math.inf:
        raise HvdkitError(f"count must be a number of samples, at least 0; got {count}")
    return values, weight


def _demand_same(ranks: Sequence[int], values: list[Any], what: str) -> None:
    for value in values:
        if value != values[0]:
            first, others = (
                [r for r, v in zip(ranks, values, strict=True) if v == version]
                for version in (values[0], value)
            )
            raise RankDisagreementError(
                f"average_metrics: the {what} must be the same on every rank, but "
                f"{format_ranks(first)} gave {values[0]} and {format_ranks(others)} gave {value}"
            )


def _mean(values: list[float], weights: list[float]) -> float:
    total = sum(weights)
    if total == 0:
        return math.nan
    return sum(v * w for v, w in zip(values, weights, strict=True) if w) / total
