"""From files to a report: which sections follow from which results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.results.files import check_summary, read_result
from hvdkit.results.report.conditions import describe_conditions, find_warnings
from hvdkit.results.report.convergence import describe_convergence
from hvdkit.results.report.forecasts import describe_forecasts
from hvdkit.results.report.messages import describe_messages
from hvdkit.results.report.others import describe_changes, describe_samples
from hvdkit.results.report.parts import Named, Report, Section
from hvdkit.results.report.profiles import describe_profiles
from hvdkit.results.report.training import describe_training

__all__ = ["build_report"]

_DRIVERS: dict[str, Callable[[Sequence[Named]], list[Section]]] = {
    "train": describe_training,
    "allreduce": describe_messages,
    "converge": describe_convergence,
    "predict": describe_forecasts,
    "profile": describe_profiles,
}
# Rounds of the same thing twice; the samples of others are no rounds.
_COMPARED = ("train", "allreduce")

# Controls and lone surrogates, which neither HTML nor a terminal can show.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def build_report(paths: Sequence[Path]) -> Report:
    """Read results and describe them, those of one driver side by side.

    Args:
        paths: At least one; named by file name, or by path where names are equal.

    Raises:
        HvdkitError: A file is no result, or its summary is not that of its driver.
    """
    paths = list(dict.fromkeys(paths))
    plain = len({path.name for path in paths}) == len(paths)
    results = []
    for path in paths:
        result = read_result(path)
        check_summary(result, str(path))
        results.append(Named(_clean(path.name if plain else str(path)), _clean(result)))
    sections = [describe_conditions(results)]
    for driver, describe in _DRIVERS.items():
        chosen = [named for named in results if named.result["driver"] == driver]
        if chosen:
            sections += describe(chosen)
        if len(chosen) > 1 and driver in _COMPARED:
            sections += describe_changes(chosen)
    others = [named for named in results if named.result["driver"] not in _DRIVERS]
    sections += describe_samples(others)
    return Report("hvdkit report", find_warnings(results), sections)


def _clean(value: Any) -> Any:
    """Replace what cannot be shown in every string of a value."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_clean(name): _clean(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_clean(one) for one in value]
    return value
