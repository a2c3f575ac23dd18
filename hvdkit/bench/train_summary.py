"""What the samples of training mean: throughput, scaling, waiting, cost, ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from hvdkit.bench.timing import find_slowest, summarize_round
from hvdkit.results.statistics import estimate_geometric_mean, estimate_ratio

__all__ = ["Measured", "summarize"]


@dataclass
class Measured:
    """One candidate on one model with one number of workers.

    Attributes:
        labels: As in the result's series.
        overhead_s: Of the clock, a step.
        samples: By metric, as [round][rank][step]: ``step_s``, and ``input_s`` with an input.
        peak_rss_bytes: Of each rank.
        device_peak_bytes: Of each rank with a GPU.
    """

    labels: dict[str, Any]
    overhead_s: float
    samples: dict[str, list[list[list[float]]]] = field(default_factory=dict)
    peak_rss_bytes: list[int] = field(default_factory=list)
    device_peak_bytes: list[int] = field(default_factory=list)

    def add_round(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Take in what each rank answered."""
        for metric in answers[0]["samples"]:
            ranks = [answer["samples"][metric] for answer in answers]
            self.samples.setdefault(metric, []).append(ranks)
        peaks = [answer["device_peak_bytes"] for answer in answers if "device_peak_bytes" in answer]
        self.device_peak_bytes = peaks

    @property
    def rounds_s(self) -> list[float]:
        """The median step of each round, in seconds."""
        return [summarize_round(ranks_s) for ranks_s in self.samples["step_s"]]


def summarize(
    measured: Sequence[Measured], price_per_worker_hour: float | None = None
) -> dict[str, Any]:
    """Make runs and ratios of samples.

    Args:
        measured: Of all models, candidates and numbers of workers, in rounds side by side.
        price_per_worker_hour: For the cost; None if unknown.

    Returns:
        ``runs``, a record for each of ``measured``: its labels, ``samples_per_s`` (of all workers
        together), ``step_time_s`` (median), ``step_time_p95_s``, ``rank_spread`` (median step of
        the slowest rank over that of the fastest), ``scaling_efficiency`` (samples/s over those of
        the fewest workers, over the ratio of the workers), ``communication_share`` (of a step,
        beyond the step of "single", which does all but communicate), ``input_share``,
        ``peak_memory_bytes`` (of the largest worker: of its GPU, if it has one),
        ``cost_per_million_samples``, ``overhead_share`` (of the clock in a step); None where
        unknown. ``ratios``: of step times, paired by round, for each pair of candidates.
        ``geometric_means``: of these over the models, where there are several.
    """
    runs = [_describe(one, measured, price_per_worker_hour) for one in measured]
    ratios: list[dict[str, Any]] = []
    groups: dict[tuple[int, str, str], dict[str, list[float]]] = {}
    for index, one in enumerate(measured):
        for other in measured[index + 1 :]:
            if not _differ_by(one, other, "candidate"):
                continue
            pairs = [a / b for a, b in zip(one.rounds_s, other.rounds_s, strict=True)]
            names = {"workers": one.labels["workers"], "candidate": one.labels["candidate"]}
            names["reference"] = other.labels["candidate"]
            ratios.append({"model": one.labels["model"], **names, **asdict(estimate_ratio(pairs))})
            key = (names["workers"], names["candidate"], names["reference"])
            groups.setdefault(key, {})[one.labels["model"]] = pairs
    means = [
        {
            "workers": workers,
            "candidate": candidate,
            "reference": reference,
            **asdict(estimate_geometric_mean(models)),
        }
        for (workers, candidate, reference), models in groups.items()
        if len(models) > 1
    ]
    return {"runs": runs, "ratios": ratios, "geometric_means": means}


def _describe(
    one: Measured, measured: Sequence[Measured], price_per_worker_hour: float | None
) -> dict[str, Any]:
    workers = one.labels["workers"]
    steps_s = [step for ranks_s in one.samples["step_s"] for step in find_slowest(ranks_s)]
    step_s = median(one.rounds_s)
    throughput = _find_throughput(one)
    others = [other for other in measured if other is not one]
    # One worker has nobody to communicate with; what its hooks cost is in the ratios.
    single = [other for other in others if workers > 1 and _is_limit_of(other, one)]
    fewest = min(
        (other for other in measured if other is one or _differ_by(one, other, "workers")),
        key=lambda other: other.labels["workers"],
    )
    base = fewest.labels["workers"]
    efficiency = throughput / _find_throughput(fewest) / (workers / base)
    peaks = one.device_peak_bytes or one.peak_rss_bytes
    cost = None
    if price_per_worker_hour is not None:
        cost = price_per_worker_hour * workers / 3600 / throughput * 1e6
    # How long each rank takes by itself shows in the steps' spread only as far as it waits last.
    ranks_s = [
        median(step for ranks in one.samples["step_s"] for step in ranks[rank])
        for rank in range(workers)
    ]
    waits = one.samples.get("input_s")
    return {
        **one.labels,
        "samples_per_s": throughput,
        "step_time_s": step_s,
        "step_time_p95_s": quantiles(steps_s, n=20, method="inclusive")[-1]
        if len(steps_s) > 1
        else steps_s[0],
        "rank_spread": max(ranks_s) / min(ranks_s),
        "scaling_efficiency": None if fewest is one else efficiency,
        "communication_share": 1 - median(single[0].rounds_s) / step_s if single else None,
        "input_share": median(map(summarize_round, waits)) / step_s if waits else None,
        "peak_memory_bytes": max(peaks) if peaks else None,
        "cost_per_million_samples": cost,
        "overhead_share": one.overhead_s / step_s,
    }


def _find_throughput(one: Measured) -> float:
    """Return the samples that all workers together train on in a second."""
    throughput: float = one.labels["global_batch"] / median(one.rounds_s)
    return throughput


def _differ_by(one: Measured, other: Measured, label: str) -> bool:
    """Whether two differ in one thing, and in what must follow from it."""
    free = {label, "batch", "global_batch"} if label == "workers" else {label}
    names = {name for name in one.labels if one.labels[name] != other.labels[name]}
    return label in names and names <= free


def _is_limit_of(other: Measured, one: Measured) -> bool:
    return other.labels["candidate"] == "single" and _differ_by(one, other, "candidate")
