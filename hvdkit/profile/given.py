"""What a prediction is told in place of a measurement, and what it says about its sources."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hvdkit.profile.allreduce_cost import Algorithm
from hvdkit.profile.scaling import Scaling

__all__ = ["Basis", "Given", "vary"]


@dataclass(frozen=True)
class Given:
    """What is known without a measurement, or shall be taken in its place; None where it is not.

    Attributes:
        compute_s: Computation of a step of one worker, with the whole ``batch``.
        fixed_s: What of it does not depend on the samples.
        within_latency_s: Of the link from worker to worker of a host.
        within_bandwidth: The same, in bytes/s.
        between_latency_s: Of the link from host to host.
        between_bandwidth: The same, in bytes/s.
        overlap: As in ``ScalingModel``, as are those that follow.
    """

    compute_s: float | None = None
    fixed_s: float | None = None
    within_latency_s: float | None = None
    within_bandwidth: float | None = None
    between_latency_s: float | None = None
    between_bandwidth: float | None = None
    overlap: float | None = None
    straggler: float | None = None
    gradient_bytes: float | None = None
    bucket_bytes: float | None = None
    batch: int | None = None
    scaling: Scaling | None = None
    workers_per_host: int | None = None
    slots_per_host: int | None = None
    algorithm: Algorithm = "ring"
    price_per_worker_hour: float | None = None


@dataclass
class Basis:
    """What a prediction rests on.

    Attributes:
        origins: Where each part of the model comes from, by the part's name.
        assumptions: What nothing measured or given says, a sentence each.
    """

    origins: dict[str, str] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)


def vary(given: Given, uncertainty: float, rng: random.Random) -> Given:
    """Return the same with each physical quantity drawn from its stated range.

    Args:
        given: The values in the middle of the ranges.
        uncertainty: A range reaches so far up and down, as a share of its value.
        rng: Draws evenly.
    """

    def draw() -> float:
        return rng.uniform(1 - uncertainty, 1 + uncertainty)

    step = draw()  # the parts of one measurement are wrong by the same share
    varied = {
        "compute_s": step,
        "fixed_s": step,
        **{
            name: draw()
            for name in (
                "within_latency_s",
                "within_bandwidth",
                "between_latency_s",
                "between_bandwidth",
                "overlap",
                "straggler",
            )
        },
    }
    values = {
        name: getattr(given, name) * factor
        for name, factor in varied.items()
        if getattr(given, name) is not None
    }
    if "overlap" in values:
        values["overlap"] = min(1.0, values["overlap"])
    return replace(given, **values)
