"""Ratios of interleaved measurements, with bootstrap intervals; needs the standard library only."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

__all__ = [
    "CONFIDENCE",
    "RESAMPLES",
    "Interval",
    "estimate_geometric_mean",
    "estimate_ratio",
]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def estimate_ratio(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Estimate a ratio from one ratio a round: the median, with a percentile bootstrap interval.

    Pairing within a round cancels what slows a whole round down (a neighbour on the machine, a
    lower clock), which two medians over all rounds would not.

    Args:
        ratios: numerator over denominator, one positive number a round.
        seed: of the resampling, so that the same samples give the same interval.

    Raises:
        ValueError: no ratios, or one that is not positive and finite.

    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    return estimate_geometric_mean({"": ratios}, seed)


def estimate_geometric_mean(ratios: Mapping[str, Sequence[float]], seed: int = 0) -> Interval:
    """Estimate the geometric mean over groups (models) of each group's median ratio.

    Rounds are resampled within each group: another set of models is another question.
    """
    if not ratios:
        raise ValueError("no ratios were given; measure at least one round")
    for name, values in ratios.items():
        if not values:
            raise ValueError(f"no ratios for {name!r}; measure at least one round")
        if any(not (value > 0 and math.isfinite(value)) for value in values):
            raise ValueError(f"ratios for {name!r} must be positive and finite, got {values}")
    rng = random.Random(seed)
    replicates = sorted(
        geometric_mean(median(rng.choices(values, k=len(values))) for values in ratios.values())
        for _ in range(RESAMPLES)
    )
    tail = (1 - CONFIDENCE) / 2
    return Interval(
        estimate=geometric_mean(median(values) for values in ratios.values()),
        low=replicates[math.floor(tail * (RESAMPLES - 1))],
        high=replicates[math.ceil((1 - tail) * (RESAMPLES - 1))],
    )
