"""The scaling model: how long a synchronous data-parallel step takes on any number of workers.

A step is the computation of the slowest worker and the communication that nothing hides:

* Computation takes a fixed time and a time for each sample. Workers of one host slow each other
  down (memory bandwidth), and share its cores in turns when there are more workers than these.
* Gradients travel in buckets of equal size, one after the other. They become ready evenly over the
  backward pass, so the last one is ready when nothing is left to hide it behind.
* A share ``overlap`` of the communication takes nothing from the computation that it runs beside;
  the rest makes that longer by as much, as transfers do that need the cores.
* A worker's step is drawn out at random. The largest of n draws from a Gumbel distribution lies
  ``scale * ln(n)`` above one of them, in the mean and in the median: the distribution that maxima
  of many light-tailed ones tend to.

Source: buckets: Li et al., "PyTorch Distributed", VLDB 2020. The backward pass as two thirds of a
step: Kaplan et al., "Scaling Laws for Neural Language Models", arXiv:2001.08361, section 2.1.
Maxima: S. Coles, An Introduction to Statistical Modeling of Extreme Values (2001), chapter 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from hvdkit.errors import HvdkitError
from hvdkit.profile.allreduce_cost import ALGORITHMS, Algorithm, Link, estimate_allreduce_s

__all__ = ["Point", "Scaling", "ScalingModel", "Step", "predict_point", "predict_step"]

Scaling = Literal["weak", "strong"]

# The gradients of the inputs and those of the parameters each cost what the forward pass does.
BACKWARD_SHARE = 2 / 3
# Computing binds where nothing else, twice as good, would shorten the step by this share.
WORTHWHILE = 0.05


@dataclass(frozen=True)
class ScalingModel:
    """All that the time of a step depends on.

    Attributes:
        fixed_s: Computation of a step that does not depend on its samples.
        per_sample_s: Computation of a sample.
        batch: Samples a step: of each worker (weak scaling) or of all together (strong).
        scaling: Whether each worker keeps its batch or all share one.
        gradient_bytes: What one step reduces, as it travels.
        bucket_bytes: What travels together.
        workers_per_host: Of a full host.
        slots_per_host: Workers of a host that compute at full speed side by side; more take turns.
        contention: By what share each further worker of a host slows down the computation.
        within: From worker to worker within a host.
        between: From host to host.
        algorithm: Of the all-reduce.
        overlap: Share of the communication that takes nothing from the computation, 0 to 1.
        overhead_s: What a step takes longer on several workers that is neither.
        straggler: Scale of a worker's random delay, as a share of its computation.
        accumulate: Passes a step; gradients travel during the last.
        price_per_worker_hour: In any currency.
    """

    per_sample_s: float
    batch: int
    gradient_bytes: float
    within: Link | None
    between: Link | None
    fixed_s: float = 0.0
    scaling: Scaling = "weak"
    bucket_bytes: float = 8 << 20
    workers_per_host: int = 1
    slots_per_host: int = 1
    contention: float = 0.0
    algorithm: Algorithm = "ring"
    overlap: float = 1.0
    overhead_s: float = 0.0
    straggler: float = 0.0
    accumulate: int = 1
    price_per_worker_hour: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no training has."""
        zero = ("fixed_s", "per_sample_s", "contention", "overhead_s", "straggler")
        for name in (*zero, "gradient_bytes", "bucket_bytes", "price_per_worker_hour"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise HvdkitError(f"{name} must be 0 or more; got {value}")
        for name in ("batch", "workers_per_host", "slots_per_host", "accumulate", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise HvdkitError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.overlap <= 1:
            raise HvdkitError(f"overlap is a share from 0 to 1; got {self.overlap}")
        if self.fixed_s + self.per_sample_s <= 0:
            raise HvdkitError("the computation of a step takes no time at all; measure it again")
        if self.scaling not in ("weak", "strong") or self.algorithm not in ALGORITHMS:
            raise HvdkitError(
                f"scaling is weak or strong and the algorithm one of {', '.join(ALGORITHMS)}; "
                f"got {self.scaling} and {self.algorithm}"
            )


@dataclass(frozen=True)
class Step:
    """What a step is made of, in seconds.

    Attributes:
        compute_s: Computation of a typical worker.
        straggler_s: What the slowest worker takes longer.
        communication_s: All of it, hidden or not.
        bucket_s: That of one bucket.
        exposed_s: What of it makes the step longer.
        overhead_s: What else a step on several workers takes.
    """

    compute_s: float
    straggler_s: float
    communication_s: float
    bucket_s: float
    exposed_s: float
    overhead_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.straggler_s + self.exposed_s + self.overhead_s


@dataclass(frozen=True)
class Point:
    """What one number of workers comes to.

    Attributes:
        workers: How many.
        global_batch: Samples a step, of all workers.
        step: Its parts.
        scaling_efficiency: Samples/s over those of one worker, over the number of workers.
        samples_per_s: Of all workers.
        cost_per_million_samples: None without a price.
        binds: What besides computing would shorten the step most if it were twice as good;
            computing, where that is less than a 20th of the step.
    """

    workers: int
    global_batch: int
    step: Step
    scaling_efficiency: float
    samples_per_s: float
    cost_per_million_samples: float | None
    binds: str


def predict_step(model: ScalingModel, workers: int, samples: int | None = None) -> Step:
    """Return what a step takes.

    Args:
        model: What it depends on.
        workers: How many.
        samples: Of each worker; None for what the model's batch and scaling make it.

    Raises:
        HvdkitError: There are fewer samples than workers, or the model lacks a link.
    """
    if workers < 1:
        raise HvdkitError(f"the number of workers must be at least 1; got {workers}")
    samples = _share_batch(model, workers) if samples is None else samples
    local = min(workers, model.workers_per_host)
    # Cores that take turns are as much slower at moving data.
    turns = max(1.0, local / model.slots_per_host)
    slowdown = 1 + model.contention * (min(local, model.slots_per_host) - 1)
    compute_s = turns * slowdown * (model.fixed_s + model.per_sample_s * samples)
    within = model.within and Link(
        model.within.latency_s * turns, model.within.bandwidth_bytes_per_s / turns
    )
    buckets = max(1, math.ceil(model.gradient_bytes / model.bucket_bytes))
    bucket_s = estimate_allreduce_s(
        model.gradient_bytes / buckets,
        workers,
        workers_per_host=model.workers_per_host,
        within=within,
        between=model.between,
        algorithm=model.algorithm,
    )
    communication_s = buckets * bucket_s
    # The first bucket is ready after its share of the backward pass, the last one at its end. From
    # the first on, transfers go on without a break, or the last waits for the computation.
    ahead_s = BACKWARD_SHARE * compute_s / model.accumulate * (buckets - 1) / buckets
    taken_s = (1 - model.overlap) * (communication_s - bucket_s)
    return Step(
        compute_s=compute_s,
        straggler_s=model.straggler * compute_s * math.log(workers),
        communication_s=communication_s,
        bucket_s=bucket_s,
        exposed_s=max(taken_s + bucket_s, communication_s - ahead_s),
        overhead_s=model.overhead_s * turns if workers > 1 else 0.0,
    )


def predict_point(model: ScalingModel, workers: int) -> Point:
    """Return step time, efficiency, throughput, cost, and what binds.

    Raises:
        HvdkitError: As ``predict_step``.
    """
    step = predict_step(model, workers)
    global_batch = model.batch * (workers if model.scaling == "weak" else 1)
    samples_per_s = global_batch / step.step_s
    alone_per_s = model.batch / predict_step(model, 1).step_s
    cost = None
    if model.price_per_worker_hour is not None:
        cost = model.price_per_worker_hour * workers / 3600 / samples_per_s * 1e6
    return Point(
        workers=workers,
        global_batch=global_batch,
        step=step,
        scaling_efficiency=samples_per_s / (workers * alone_per_s),
        samples_per_s=samples_per_s,
        cost_per_million_samples=cost,
        binds=_find_what_binds(model, workers),
    )


def _share_batch(model: ScalingModel, workers: int) -> int:
    """Return the samples of the worker that has most."""
    if model.scaling == "weak":
        return model.batch
    if workers > model.batch:
        raise HvdkitError(
            f"a batch of {model.batch} cannot be divided among {workers} workers: predict fewer "
            "workers, a larger batch, or weak scaling"
        )
    return math.ceil(model.batch / workers)


def _find_what_binds(model: ScalingModel, workers: int) -> str:
    better = {
        "latency": replace(
            model,
            within=_improve(model.within, latency=2),
            between=_improve(model.between, latency=2),
        ),
        "bandwidth within a host": replace(model, within=_improve(model.within, bandwidth=2)),
        "bandwidth between hosts": replace(model, between=_improve(model.between, bandwidth=2)),
        "stragglers": replace(model, straggler=model.straggler / 2),
        "overhead": replace(model, overhead_s=model.overhead_s / 2),
    }
    steps_s = {name: predict_step(one, workers).step_s for name, one in better.items()}
    name = min(steps_s, key=lambda one: steps_s[one])
    worth = steps_s[name] < (1 - WORTHWHILE) * predict_step(model, workers).step_s
    return name if worth else "computing"


def _improve(link: Link | None, latency: float = 1, bandwidth: float = 1) -> Link | None:
    if link is None:
        return None
    return Link(link.latency_s / latency, link.bandwidth_bytes_per_s * bandwidth)
