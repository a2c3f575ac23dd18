"""Average what ranks measured, each on its own share of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvdkit.errors import HvdkitError, RankDisagreementError
from hvdkit.torch.collectives import allgather_object, format_ranks

__all__ = ["average_metrics"]


def average_metrics(
    metrics: Mapping[str, Any],
    count: float | None = None,
    process_set: ProcessSet = global_process_set,
) -> dict[str, float]:
    """Average named numbers over all ranks, weighted by sample count where one is given.

    The result is the same on every rank, to the last bit. A rank with count 0 has no say: its
    values, NaN included, are left out. A NaN of any other rank shows in the mean.

    Collective: every rank of ``process_set`` must call.

    Args:
        metrics: Names and numbers, or tensors of one element; the same names on every rank.
        count: How many samples this rank's values are means over; None on all ranks gives the
            plain mean over ranks.
        process_set: The ranks to average over.

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
    reports = allgather_object(report, name="average_metrics", process_set=process_set)
    ranks = process_set.ranks
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


def _demand_same(ranks: list[int], values: list[Any], what: str) -> None:
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
