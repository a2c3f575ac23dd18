"""Predictions for numbers of workers, with bands, and as a result of driver ``predict``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.profile.communication_fit import take_slowest
from hvdkit.profile.compute_fit import take_typical
from hvdkit.profile.fitting import fit
from hvdkit.profile.given import Basis, Given, vary
from hvdkit.profile.measured import Measured, resample
from hvdkit.profile.scaling import Point, ScalingModel, predict_point, predict_step
from hvdkit.results.files import make_result, make_series
from hvdkit.results.statistics import CONFIDENCE

__all__ = ["REPLICATES", "Prediction", "choose_workers", "describe", "predict"]

MOST_WORKERS = 4096
REPLICATES = 200


@dataclass(frozen=True)
class Prediction:
    """What a prediction says, for each number of workers.

    Attributes:
        model: The scaling model.
        basis: What it rests on.
        points: The estimates.
        replicates: Step times in seconds of each point, under resampled rounds and ranges.
        efficiencies: Scaling efficiencies of the same.
    """

    model: ScalingModel
    basis: Basis
    points: Sequence[Point]
    replicates: Sequence[Sequence[float]]
    efficiencies: Sequence[Sequence[float]]


def choose_workers(model: ScalingModel) -> list[int]:
    """Return the powers of two up to 4,096, as far as the model reaches.

    A model that knows no link between hosts reaches to the end of one host; strong scaling ends
    at one sample a worker.
    """
    most = MOST_WORKERS if model.between is not None else model.workers_per_host
    if model.scaling == "strong":
        most = min(most, model.batch)
    if model.workers_per_host > 1 and model.within is None:
        most = 1
    counts = [1 << power for power in range(MOST_WORKERS.bit_length()) if 1 << power <= most]
    return [*counts, most] if most not in counts else counts


def predict(
    measured: Measured | None,
    given: Given,
    workers: Sequence[int] | None = None,
    *,
    uncertainty: float = 0.1,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Prediction:
    """Fit the scaling model and predict.

    Bands come from fits to resampled rounds, with what is given drawn from its range.

    Args:
        measured: Samples; None if there are none.
        given: What stands in place of a measurement.
        workers: Numbers of workers; None for ``choose_workers``.
        uncertainty: What is given may be wrong by so much up and down, as a share.
        replicates: How many fits make a band.
        seed: Of the draws: the same input gives the same bands.

    Raises:
        HvdkitError: Something that the model needs is neither measured nor given, or impossible.
    """
    if not 0 <= uncertainty < 1:
        raise HvdkitError(f"an uncertainty is a share from 0 to below 1; got {uncertainty}")
    model, basis = fit(measured, given)
    counts = choose_workers(model) if workers is None else list(workers)
    points = [predict_point(model, count) for count in counts]
    rng = random.Random(seed)
    if "overlap" not in basis.origins:
        given = replace(given, overlap=model.overlap)  # as uncertain as what is given
    steps_s: list[list[float]] = [[] for _ in points]
    efficiencies: list[list[float]] = [[] for _ in points]
    for _ in range(replicates):
        drawn = measured and resample(measured, rng)
        try:
            other, _ = fit(drawn, vary(given, uncertainty, rng))
            found = [(predict_step(other, count).step_s, count) for count in counts]
        except HvdkitError:
            continue  # such a draw of rounds has no fit; the others are the band
        alone_s = predict_step(other, 1).step_s
        for index, (step_s, count) in enumerate(found):
            share = count if model.scaling == "strong" else 1
            steps_s[index].append(step_s)
            efficiencies[index].append(alone_s / step_s / share)
    return Prediction(model, basis, points, steps_s, efficiencies)


def describe(
    prediction: Prediction, measured: Measured | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return a result of driver ``predict``.

    Its summary has ``points``, a record for each number of workers (the estimate, the 95 % band of
    step time and efficiency, and what binds), ``model`` (the model's numbers), ``measured`` (steps
    of the candidate beside what the model makes of them), ``origins`` and ``assumptions``.
    """
    points = []
    series = []
    seen = set(measured.together) if measured is not None else set()
    for index, point in enumerate(prediction.points):
        steps_s, efficiencies = prediction.replicates[index], prediction.efficiencies[index]
        here = point.workers, point.global_batch // point.workers
        low_s, high_s = _find_band(steps_s, point.step.step_s)
        low, high = _find_band(efficiencies, point.scaling_efficiency)
        points.append(
            {
                "workers": point.workers,
                "step_time_s": point.step.step_s,
                "step_time_s_low": low_s,
                "step_time_s_high": high_s,
                "scaling_efficiency": point.scaling_efficiency,
                "scaling_efficiency_low": low,
                "scaling_efficiency_high": high,
                "samples_per_s": point.samples_per_s,
                "cost_per_million_samples": point.cost_per_million_samples,
                "binds": point.binds,
                "basis": "measured" if here in seen else "extrapolated",
                **asdict(point.step),
            }
        )
        series.append(
            make_series(
                "predicted_step_s",
                "s",
                [[steps_s or [point.step.step_s]]],
                lower_is_better=True,
                workers=point.workers,
                global_batch=point.global_batch,
                scaling=prediction.model.scaling,
            )
        )
    summary = {
        "points": points,
        "model": asdict(prediction.model),
        "measured": _compare(prediction.model, measured),
        "origins": prediction.basis.origins,
        "assumptions": prediction.basis.assumptions,
    }
    machine = measured.machine if measured is not None else None
    return make_result("predict", settings, series, summary, machine)


def _compare(model: ScalingModel, measured: Measured | None) -> list[dict[str, Any]]:
    """Set measured steps beside predicted ones."""
    rows = []
    for (workers, samples), rounds in sorted(measured.together.items() if measured else ()):
        alone = measured.alone.get((workers, samples)) if measured is not None else None
        try:
            predicted_s = predict_step(model, workers, samples).step_s
        except HvdkitError:
            predicted_s = None  # the model has no link for so many
        rows.append(
            {
                "workers": workers,
                "samples_per_worker": samples,
                "step_time_s": take_slowest(rounds),
                "step_time_alone_s": None if alone is None else take_typical(alone),
                "predicted_step_time_s": predicted_s,
            }
        )
    return rows


def _find_band(replicates: Sequence[float], estimate: float) -> tuple[float, float]:
    """Return the percentiles that hold 95 %, widened to hold the estimate."""
    if not replicates:
        return estimate, estimate
    ordered = sorted(replicates)
    tail = (1 - CONFIDENCE) / 2 * (len(ordered) - 1)
    low, high = ordered[int(tail)], ordered[len(ordered) - 1 - int(tail)]
    return min(low, estimate), max(high, estimate)
