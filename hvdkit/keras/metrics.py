"""Average what ranks measured, each on its own share of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit import metrics as _metrics
from hvdkit.keras.backend import hvd
from hvdkit.keras.collectives import gather_over

__all__ = ["average_metrics"]


def average_metrics(
    metrics: Mapping[str, Any],
    count: float | None = None,
    process_set: Any = hvd.global_process_set,
) -> dict[str, float]:
    """Average named numbers over all ranks, weighted by sample count where one is given.

    Collective: every rank of ``process_set`` must call, outside of ``tf.function``.

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
    return _metrics.average_metrics(
        metrics, count, gather=gather_over(process_set), ranks=process_set.ranks
    )
