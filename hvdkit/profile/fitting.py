"""The scaling model's numbers: fitted to measurements, but for those that are given.

Every fit is least squares in closed form with bounds, so that a bootstrap can repeat it hundreds
of times.
"""

from __future__ import annotations

from hvdkit.errors import HvdkitError
from hvdkit.profile.communication_fit import fit_links, fit_overlap
from hvdkit.profile.compute_fit import fit_computation, fit_stragglers
from hvdkit.profile.given import Basis, Given
from hvdkit.profile.measured import Measured
from hvdkit.profile.scaling import ScalingModel

__all__ = ["fit"]

BUCKET_BYTES = 8 << 20  # what the adapters take unless told otherwise


def fit(measured: Measured | None, given: Given) -> tuple[ScalingModel, Basis]:
    """Return the scaling model and what it rests on.

    Args:
        measured: Samples; None if there are none.
        given: What stands in place of a measurement.

    Raises:
        HvdkitError: Something that the model needs is neither measured nor given, or impossible.
    """
    basis = Basis()
    per_host = _count_workers_per_host(measured, given)
    model = ScalingModel(
        per_sample_s=1.0,  # until the fit
        batch=_find_batch(measured, given),
        scaling=given.scaling or (measured.scaling if measured is not None else "weak"),
        gradient_bytes=_find_gradient_bytes(measured, given),
        bucket_bytes=given.bucket_bytes or _find_bucket_bytes(measured),
        within=None,
        between=None,
        workers_per_host=per_host,
        slots_per_host=given.slots_per_host
        or (measured.slots if measured is not None else per_host),
        algorithm=given.algorithm,
        accumulate=measured.labels.get("accumulate", 1) if measured is not None else 1,
        price_per_worker_hour=given.price_per_worker_hour,
    )
    model = fit_computation(model, measured, given, basis)
    model = fit_links(model, measured, given, basis)
    model = fit_stragglers(model, measured, given, basis)
    return fit_overlap(model, measured, given, basis), basis


def _count_workers_per_host(measured: Measured | None, given: Given) -> int:
    if given.workers_per_host is not None:
        return given.workers_per_host
    if measured is None:
        return 1
    if measured.hosts > 1:
        raise HvdkitError(
            f"the results were measured on {measured.hosts} hosts: say how many workers each had "
            "(--workers-per-host)"
        )
    if given.between_bandwidth is not None:
        return measured.slots
    # On the one host that there is, more workers than it has cores for were maybe tried.
    return max([measured.slots, *(key[0] for key in measured.together)])


def _find_gradient_bytes(measured: Measured | None, given: Given) -> float:
    if given.gradient_bytes is not None:
        return given.gradient_bytes
    if measured is None or not measured.labels:
        raise HvdkitError("how large the model is, is neither measured nor given: --parameters")
    return measured.gradient_bytes


def _find_bucket_bytes(measured: Measured | None) -> float:
    megabytes = measured.labels.get("bucket_size_mb") if measured is not None else None
    return megabytes * (1 << 20) if megabytes else BUCKET_BYTES


def _find_batch(measured: Measured | None, given: Given) -> int:
    if given.batch is not None:
        return given.batch
    steps = [*measured.alone, *measured.together] if measured is not None else []
    if measured is None or not steps:
        raise HvdkitError(
            "how many samples a step has, is neither measured nor given: --batch-size"
        )
    workers, samples = min(steps)
    return workers * samples if (given.scaling or measured.scaling) == "strong" else samples
