"""How long workers compute, alone and side by side, and how far their steps scatter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, median

from hvdkit.errors import HvdkitError
from hvdkit.profile.given import Basis, Given
from hvdkit.profile.measured import Measured, Rounds
from hvdkit.profile.scaling import ScalingModel

__all__ = [
    "estimate_straggler",
    "fit_computation",
    "fit_line",
    "fit_stragglers",
    "measure_computation",
    "take_typical",
]


def fit_computation(
    model: ScalingModel, measured: Measured | None, given: Given, basis: Basis
) -> ScalingModel:
    """Return the model with ``fixed_s``, ``per_sample_s`` and ``contention``.

    Raises:
        HvdkitError: No step of one worker is given, and none that reduces nothing was measured.
    """
    if model.workers_per_host > model.slots_per_host:
        basis.assumptions.append(
            f"More than {model.slots_per_host} workers on a host take turns on its cores evenly."
        )
    if given.compute_s is not None:
        return _take_given(model, given.compute_s, given, basis)
    typical_s = {} if measured is None else measure_computation(measured)
    if not typical_s:
        raise HvdkitError(
            "how long a step computes is neither measured nor given: give a result of `hvdkit "
            "bench train`, with 1 worker or with the candidate single, or --step-time-s"
        )
    counts = sorted({workers for workers, _ in typical_s})
    basis.origins["computation"] = f"measured, {', '.join(map(str, counts))} worker(s)"
    fewest = counts[0]
    turns = max(1.0, fewest / model.slots_per_host)
    base_s = {n: t / turns for (workers, n), t in typical_s.items() if workers == fewest}
    if given.fixed_s is None:
        # How the time depends on the samples shows where several numbers of them were measured.
        lines_s = {
            count: {n: t for (workers, n), t in typical_s.items() if workers == count}
            for count in counts
        }
        line_s = next((one for one in lines_s.values() if len(one) > 1), base_s)
        fixed_s, per_sample_s = fit_line(line_s)
        factor = fmean(t / (fixed_s + per_sample_s * n) for n, t in base_s.items())
        fixed_s, per_sample_s = fixed_s * factor, per_sample_s * factor
        samples = next(iter(base_s))
        if len(line_s) == 1 and (model.scaling == "strong" or model.batch != samples):
            basis.assumptions.append(
                "The computation of a step is proportional to its samples: it was measured for "
                f"{samples} a worker only (--fixed-time-s)."
            )
    else:
        fixed_s = given.fixed_s
        per_sample_s = fmean((t - fixed_s) / n for n, t in base_s.items())
    # By how much more than one worker's a step takes, and how many others there are.
    slower = [
        (workers - 1, t / (fixed_s + per_sample_s * n) - 1)
        for (workers, n), t in typical_s.items()
        if fewest == 1 < workers <= model.slots_per_host
    ]
    contention = 0.0
    if slower:
        contention = max(0.0, sum(k * r for k, r in slower) / sum(k * k for k, _ in slower))
    elif min(model.slots_per_host, model.workers_per_host) > 1:
        basis.assumptions.append("Workers of one host do not slow each other's computation down.")
    return replace(model, fixed_s=fixed_s, per_sample_s=per_sample_s, contention=contention)


def fit_stragglers(
    model: ScalingModel, measured: Measured | None, given: Given, basis: Basis
) -> ScalingModel:
    """Return the model with ``straggler``."""
    if given.straggler is not None:
        basis.origins["stragglers"] = "given"
        return replace(model, straggler=given.straggler)
    own = {} if measured is None else _find_own(measured)
    steps = {} if measured is None else {**own, **measured.alone}
    # Workers that take turns wait for each other: their steps scatter for another reason.
    quiet = [key for key in steps if key[0] <= model.slots_per_host]
    if not quiet:
        basis.assumptions.append("No worker is ever slower than another (--straggler).")
        return model
    basis.origins["stragglers"] = f"measured, {max(quiet)[0]} worker(s)"
    return replace(model, straggler=estimate_straggler(steps[max(quiet)]))


def estimate_straggler(rounds: Rounds) -> float:
    """Return the Gumbel scale of a step's random delay, as a share of the step.

    From the second L-moment of each round (half the mean distance of two samples), which is
    ``scale * ln(2)``, as the median over rounds: one hiccup does not count for many.

    Args:
        rounds: Seconds as [round][rank][step], of steps that wait for no other rank.

    Source: J. Hosking, "L-moments", Journal of the Royal Statistical Society B 52 (1990).
    """
    scales = []
    for ranks in rounds:
        steps_s = sorted(step for rank in ranks for step in rank)
        count = len(steps_s)
        if count > 1:
            weighted_s = sum((2 * i - count + 1) * step for i, step in enumerate(steps_s))
            moment_s = weighted_s / (count * (count - 1))
            scales.append(moment_s / math.log(2) / median(steps_s))
    return median(scales) if scales else 0.0


def fit_line(times_s: Mapping[int, float]) -> tuple[float, float]:
    """Fit ``time = fixed + per sample * samples``, by least squares, neither part negative.

    Args:
        times_s: Seconds by number of samples; for a single one, the fixed part is 0.
    """
    proportional = sum(n * t for n, t in times_s.items()) / sum(n * n for n in times_s)
    mean_n, mean_t = fmean(times_s), fmean(times_s.values())
    spread = sum((n - mean_n) ** 2 for n in times_s)
    if spread == 0:
        return 0.0, proportional
    slope = sum((n - mean_n) * (t - mean_t) for n, t in times_s.items()) / spread
    if slope < 0:
        return mean_t, 0.0
    fixed_s = mean_t - slope * mean_n
    return (fixed_s, slope) if fixed_s >= 0 else (0.0, proportional)


def measure_computation(measured: Measured) -> dict[tuple[int, int], float]:
    """Return what the candidate's workers compute in a step, in seconds, by workers and samples.

    With one worker that is its own step. With more it is that of "single", times how much slower
    or faster the candidate is with one worker: they differ in more than communication, such as
    whether memory for gradients is kept.
    """
    alone_s = {key: take_typical(rounds) for key, rounds in measured.alone.items()}
    own_s = {key: take_typical(rounds) for key, rounds in _find_own(measured).items()}
    paces = [own_s[key] / alone_s[key] for key in own_s if key in alone_s]
    pace = fmean(paces) if paces else 1.0
    return {**{key: pace * step_s for key, step_s in alone_s.items()}, **own_s}


def take_typical(rounds: Rounds) -> float:
    """Return the median over rounds of the median step of all workers, in seconds."""
    return median(median(step for rank in ranks for step in rank) for ranks in rounds)


def _take_given(model: ScalingModel, compute_s: float, given: Given, basis: Basis) -> ScalingModel:
    fixed_s = given.fixed_s or 0.0
    if not 0 <= fixed_s <= compute_s < math.inf:
        raise HvdkitError(f"a step of {compute_s} s cannot have a fixed part of {fixed_s} s")
    basis.origins["computation"] = "given"
    if given.fixed_s is None and model.scaling == "strong":
        basis.assumptions.append(
            "The computation of a step is proportional to its samples (--fixed-time-s)."
        )
    per_sample_s = (compute_s - fixed_s) / model.batch
    return replace(model, fixed_s=fixed_s, per_sample_s=per_sample_s)


def _find_own(measured: Measured) -> dict[tuple[int, int], Rounds]:
    """Return steps of the candidate with one worker, who has nobody to reduce with."""
    return {key: rounds for key, rounds in measured.together.items() if key[0] == 1}
