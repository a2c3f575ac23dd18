"""What links cost, and how much of the communication shows in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, median

from hvdkit.errors import HvdkitError
from hvdkit.profile.allreduce_cost import Link
from hvdkit.profile.compute_fit import measure_computation
from hvdkit.profile.given import Basis, Given
from hvdkit.profile.measured import Measured, Rounds
from hvdkit.profile.scaling import ScalingModel, predict_step

__all__ = ["fit_link", "fit_links", "fit_overlap", "take_slowest"]

PLACES = {"within": "transfers within a host", "between": "transfers between hosts"}


def fit_link(points: Iterable[tuple[int, float, float]]) -> Link | None:
    """Fit latency and bandwidth of a ring's link to the times of all-reduces.

    Least squares of the relative error, so that small messages count as much as large ones. None
    where larger messages did not take longer, or there are too few sizes to tell.

    Args:
        points: Workers, size in bytes and time in seconds of each.
    """
    # time = latency * steps + bytes through each link / bandwidth, divided by time.
    rows = [(2 * (n - 1) / t, 2 * (n - 1) / n * size / t) for n, size, t in points]
    a11 = sum(a * a for a, _ in rows)
    a12 = sum(a * b for a, b in rows)
    a22 = sum(b * b for _, b in rows)
    b1, b2 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = a11 * a22 - a12 * a12
    if determinant <= 1e-9 * a11 * a22:
        return None
    latency_s = (b1 * a22 - b2 * a12) / determinant
    per_byte_s = (a11 * b2 - a12 * b1) / determinant
    if latency_s < 0:
        latency_s, per_byte_s = 0.0, b2 / a22
    return Link(latency_s, 1 / per_byte_s) if per_byte_s > 0 else None


def fit_links(
    model: ScalingModel, measured: Measured | None, given: Given, basis: Basis
) -> ScalingModel:
    """Return the model with ``within`` and ``between``; None for what nobody measured or gave.

    Raises:
        HvdkitError: A latency is given and no bandwidth is known.
    """
    within, between = _measure_links(model, measured)
    within = _complete("within", within, given.within_latency_s, given.within_bandwidth, basis)
    between = _complete("between", between, given.between_latency_s, given.between_bandwidth, basis)
    if model.workers_per_host > 1 and within is None and between is not None:
        within = between
        basis.assumptions.append(
            "Transfers within a host cost what they do between hosts (--intra-bandwidth-gbytes-s)."
        )
    return replace(model, within=within, between=between)


def fit_overlap(
    model: ScalingModel, measured: Measured | None, given: Given, basis: Basis
) -> ScalingModel:
    """Return the model with ``overlap`` and ``overhead_s``.

    First as much overlap as explains the steps; what is longer than with none at all is overhead.
    """
    if given.overlap is not None:
        basis.origins["overlap"] = "given"
        model = replace(model, overlap=given.overlap)
    steps = {} if measured is None else _find_comparable(model, measured)
    if not steps:
        if given.overlap is None:
            basis.assumptions.append(
                "All communication but the last bucket's runs beside the backward pass (--overlap)."
            )
        return model
    shown = []
    for (workers, samples), (together_s, alone_s) in steps.items():
        ideal = predict_step(replace(model, overlap=1.0), workers, samples)
        compute_s = ideal.compute_s if alone_s is None else alone_s
        shown.append((workers, samples, together_s - compute_s - ideal.straggler_s, ideal))
    if given.overlap is None:
        counts = ", ".join(map(str, sorted({workers for workers, _ in steps})))
        basis.origins["overlap"] = f"measured, {counts} workers"
        # Where transfers never pause, the step does not depend on the overlap.
        pairs = [
            (ideal.communication_s - wait_s, ideal.communication_s - ideal.bucket_s)
            for _, _, wait_s, ideal in shown
            if wait_s > ideal.exposed_s or ideal.exposed_s == ideal.bucket_s
        ]
        hidden = sum(most * most for _, most in pairs)
        share = sum(less * most for less, most in pairs) / hidden if hidden > 0 else 1.0
        model = replace(model, overlap=min(1.0, max(0.0, share)))
    rest = [
        (wait_s - predict_step(model, workers, samples).exposed_s)
        / max(1.0, min(workers, model.workers_per_host) / model.slots_per_host)
        for workers, samples, wait_s, _ in shown
    ]
    return replace(model, overhead_s=max(0.0, fmean(rest)))


def take_slowest(rounds: Rounds) -> float:
    """Return the median over rounds of the median step, which its slowest worker ends."""
    return median(median(map(max, zip(*ranks, strict=False))) for ranks in rounds)


def _measure_links(
    model: ScalingModel, measured: Measured | None
) -> tuple[Link | None, Link | None]:
    if measured is None or not measured.messages:
        return None, None
    local, remote = [], []
    for (workers, size), rounds in measured.messages.items():
        # Cores that take turns are as much slower at moving data.
        turns = max(1.0, min(workers, model.workers_per_host) / model.slots_per_host)
        point = (workers, size, take_slowest(rounds) / turns)
        if workers <= model.workers_per_host:
            local.append((turns, point))
        elif measured.hosts > 1:
            remote.append((turns, point))
    # Where nobody had to take turns, the times are the plain ones.
    quiet = [point for turns, point in local if turns == 1]
    # The slowest link sets the pace of a ring over several hosts.
    return (
        fit_link(quiet or [point for _, point in local]),
        fit_link([point for _, point in remote]),
    )


def _complete(
    name: str, link: Link | None, latency_s: float | None, bandwidth: float | None, basis: Basis
) -> Link | None:
    """Put what is given in place of what is measured."""
    where = PLACES[name]
    if link is not None and (latency_s is None or bandwidth is None):
        basis.origins[where] = "measured"
    if latency_s is None and bandwidth is None:
        return link
    if link is None:
        if bandwidth is None:
            raise HvdkitError(f"a latency of {where} is given, but no bandwidth: give both")
        if latency_s is None:
            basis.assumptions.append(f"There is no latency in {where}.")
        basis.origins[where] = "given"
        return Link(latency_s or 0.0, bandwidth)
    basis.origins[where] = "given" if None not in (latency_s, bandwidth) else "measured and given"
    return Link(
        link.latency_s if latency_s is None else latency_s,
        link.bandwidth_bytes_per_s if bandwidth is None else bandwidth,
    )


def _find_comparable(
    model: ScalingModel, measured: Measured
) -> dict[tuple[int, int], tuple[float, float | None]]:
    """Return measured steps of several workers, with and (None if unmeasured) without reductions.

    Those in which cores took turns only where there are no others, and none whose cost of
    transfers is unknown.
    """
    computation_s = measure_computation(measured)
    found = {}
    for (workers, samples), rounds in measured.together.items():
        local = min(workers, model.workers_per_host)
        needed = [model.within] if local > 1 else []
        needed += [model.between] if workers > model.workers_per_host else []
        if workers > 1 and None not in needed:
            alone_s = computation_s.get((workers, samples))
            found[workers, samples] = (take_slowest(rounds), alone_s)
    quiet = {
        key: times
        for key, times in found.items()
        if min(key[0], model.workers_per_host) <= model.slots_per_host
    }
    return quiet or found
