"""Goals that are set before a measurement: ``scaling_efficiency>=0.8``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import HvdkitError

__all__ = ["METRICS", "Goal", "find_missed", "find_unmeasured", "parse_goal"]

METRICS = (
    "samples_per_s",
    "step_time_s",
    "step_time_p95_s",
    "rank_spread",
    "scaling_efficiency",
    "communication_share",
    "input_share",
    "peak_memory_bytes",
    "cost_per_million_samples",
)
# And the ratio of step times to another candidate's.
RATIO = re.compile(r"ratio_to_(\w+)")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Goal:
    """What a metric of hvdkit's run with the most workers must be.

    Attributes:
        metric: One of ``METRICS``, or ratio_to_CANDIDATE.
        comparison: ">=", "<=", ">" or "<".
        bound: In the metric's unit.
    """

    metric: str
    comparison: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.bound:g}"


def parse_goal(text: str) -> Goal:
    """Return the goal that ``text`` says.

    Raises:
        HvdkitError: It says none.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
    try:
        goal = Goal(match[1], match[2], float(match[3])) if match else None
    except ValueError:
        goal = None
    if goal is None:
        raise HvdkitError(f"{text!r} is no goal; write one like scaling_efficiency>=0.8")
    if goal.metric not in METRICS and not RATIO.fullmatch(goal.metric):
        raise HvdkitError(
            f"{goal.metric} is no metric; known are {', '.join(METRICS)} and ratio_to_CANDIDATE"
        )
    return goal


def find_unmeasured(
    goals: Sequence[Goal],
    workers: Sequence[int],
    peers: Sequence[str],
    *,
    has_input: bool,
    has_price: bool,
) -> str | None:
    """Return why a goal cannot be decided on with what shall be measured; None if all can.

    Args:
        goals: Set before a measurement.
        workers: Numbers of workers.
        peers: Candidates beside hvdkit.
        has_input: Whether batches come from an input.
        has_price: Whether a worker's price is known.
    """
    needs = {
        "scaling_efficiency": ("two numbers of workers in --np", len(workers) > 1),
        "communication_share": ("more than one worker in --np", max(workers) > 1),
        "input_share": ("--input", has_input),
        "cost_per_million_samples": ("--price-per-worker-hour", has_price),
        **{f"ratio_to_{peer}": ("", True) for peer in peers},
    }
    for goal in goals:
        peer = RATIO.fullmatch(goal.metric)
        missing = f"{peer[1]} in --against" if peer else ""
        need, is_met = needs.get(goal.metric, (missing, peer is None))
        if not is_met:
            return f"the goal {goal} needs {need}"
    return None


def find_missed(goals: Sequence[Goal], summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each goal that was missed, on any model, with the most workers.

    Args:
        goals: To hold against hvdkit's runs.
        summary: Of a result of training.
    """
    runs = [run for run in summary["runs"] if run["candidate"] == "hvdkit"]
    most = max(run["workers"] for run in runs)
    missed = []
    for run in runs:
        for goal in goals:
            if run["workers"] < most:
                continue
            value = _find_value(goal, run, summary)
            if value is None:
                missed.append(f"{goal}: was not measured on {run['model']}")
            elif not _COMPARISONS[goal.comparison](value, goal.bound):
                missed.append(f"{goal}: {value:.4g} on {run['model']} with {most} worker(s)")
    return missed


def _find_value(goal: Goal, run: Mapping[str, Any], summary: Mapping[str, Any]) -> float | None:
    match = RATIO.fullmatch(goal.metric)
    if match is None:
        value: float | None = run[goal.metric]
        return value
    for ratio in summary["ratios"]:
        same = ratio["model"] == run["model"] and ratio["workers"] == run["workers"]
        if same and (ratio["candidate"], ratio["reference"]) == ("hvdkit", match[1]):
            estimate: float = ratio["estimate"]
            return estimate
    return None
