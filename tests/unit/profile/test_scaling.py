"""The scaling model: what must hold of it whatever its numbers are."""

import math
import random
from dataclasses import replace
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import HvdkitError
from hvdkit.profile.allreduce_cost import ALGORITHMS, Link
from hvdkit.profile.scaling import ScalingModel, predict_point, predict_step

links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e7, 1e12))
models = st.builds(
    ScalingModel,
    per_sample_s=st.floats(1e-6, 1),
    fixed_s=st.floats(0, 1),
    batch=st.integers(1, 8192),
    gradient_bytes=st.floats(0, 1e10),
    within=links,
    between=links,
    bucket_bytes=st.floats(1 << 20, 1 << 28),
    workers_per_host=st.integers(1, 16),
    slots_per_host=st.integers(1, 16),
    contention=st.floats(0, 1),
    algorithm=st.sampled_from(ALGORITHMS),
    overlap=st.floats(0, 1),
    overhead_s=st.floats(0, 0.1),
    straggler=st.floats(0, 0.5),
    accumulate=st.integers(1, 4),
    price_per_worker_hour=st.one_of(st.none(), st.floats(0, 100)),
)
counts = st.integers(1, 4096)
SLACK = 1 + 1e-9  # of rounding


def make(**changes):
    """One sample takes 1 s; 100 buckets of 1 MB; links of 1 GB/s."""
    known = {
        "per_sample_s": 1.0,
        "batch": 1,
        "gradient_bytes": 100e6,
        "bucket_bytes": 1e6,
        "within": Link(0, 1e9),
        "between": Link(0, 1e9),
    }
    return ScalingModel(**known | changes)


@given(models, counts)
def test_efficiency_is_at_most_one_and_no_time_negative(model, workers):
    point = predict_point(model, workers)
    parts = vars(point.step)
    assert all(value >= 0 and math.isfinite(value) for value in parts.values())
    assert 0 < point.scaling_efficiency <= SLACK
    assert point.step.exposed_s <= point.step.communication_s * SLACK


@given(models, st.integers(1, 4096))
def test_strong_scaling_never_beats_division_or_the_communication(model, workers):
    model = replace(model, scaling="strong", batch=max(model.batch, workers))
    point = predict_point(model, workers)
    assert point.scaling_efficiency <= SLACK
    assert point.step.step_s >= predict_step(model, 1).step_s / workers / SLACK
    assert point.step.step_s * SLACK >= point.step.communication_s


@given(models, st.sampled_from(["weak", "strong"]))
def test_one_worker_takes_exactly_the_computation(model, scaling):
    model = replace(model, scaling=scaling)
    step = predict_step(model, 1)
    assert step.step_s == step.compute_s == model.fixed_s + model.per_sample_s * model.batch
    point = predict_point(model, 1)
    assert point.scaling_efficiency == 1
    assert point.binds == "computing"


@given(models, counts, st.floats(1, 100), st.sampled_from(["within", "between"]))
def test_better_links_never_make_a_step_longer(model, workers, factor, name):
    before = predict_step(model, workers).step_s
    link = getattr(model, name)
    for better in (
        Link(link.latency_s / factor, link.bandwidth_bytes_per_s),
        Link(link.latency_s, link.bandwidth_bytes_per_s * factor),
    ):
        assert predict_step(replace(model, **{name: better}), workers).step_s <= before * SLACK


@given(models, counts, st.floats(0, 1))
def test_more_overlap_never_makes_a_step_longer(model, workers, share):
    less = replace(model, overlap=model.overlap * share)
    assert predict_step(model, workers).step_s <= predict_step(less, workers).step_s * SLACK


@given(models, st.integers(2, 4096))
def test_the_last_bucket_is_never_hidden(model, workers):
    whole = predict_step(model, workers)
    buckets = max(1, math.ceil(model.gradient_bytes / model.bucket_bytes))
    assert whole.exposed_s * SLACK >= whole.communication_s / buckets


def test_communication_by_hand():
    # 2 workers send 2 x 1/2 of 100 MB at 1 GB/s: 0.1 s, of which the backward pass hides all but
    # one of 100 buckets; with half the overlap, half of the others shows as well.
    model = make()
    assert predict_step(model, 2).communication_s == pytest.approx(0.1)
    assert predict_step(model, 2).step_s == pytest.approx(1 + 0.001)
    assert predict_step(replace(model, overlap=0.5), 2).step_s == pytest.approx(1 + 0.0505)
    assert predict_step(replace(model, overlap=0.0), 2).step_s == pytest.approx(1 + 0.1)
    # A hundred times the gradients in as many buckets need 10 s; 99 % of 2/3 s hide some of it.
    large = replace(model, gradient_bytes=10e9, bucket_bytes=100e6)
    assert predict_step(large, 2).step_s == pytest.approx(1 + 10 - 0.99 * 2 / 3)
    # The computation has time to spare for what transfers take from it.
    assert predict_step(replace(large, overlap=0.95), 2) == predict_step(large, 2)
    # With two passes a step, half of the backward passes come too early to hide anything.
    assert predict_step(replace(large, accumulate=2), 2).exposed_s == pytest.approx(10 - 0.33)


def test_workers_of_a_host_slow_each_other_down_and_then_take_turns():
    model = make(
        gradient_bytes=0, workers_per_host=8, slots_per_host=4, contention=0.1, overhead_s=0.01
    )
    taken = {n: predict_step(model, n) for n in (1, 2, 4, 8, 16)}
    assert [taken[n].compute_s for n in (1, 2, 4)] == pytest.approx([1, 1.1, 1.3])
    # Twice as many as cores take twice as long; on a second host there are other cores.
    assert taken[8].compute_s == taken[16].compute_s == pytest.approx(2 * 1.3)
    assert [taken[n].overhead_s for n in (1, 4, 8)] == pytest.approx([0, 0.01, 0.02])
    moving = make(workers_per_host=8, slots_per_host=4)
    alone = make(workers_per_host=8, slots_per_host=8)
    assert predict_step(moving, 8).communication_s == pytest.approx(
        2 * predict_step(alone, 8).communication_s
    )


@settings(max_examples=10)
@given(st.integers(2, 64), st.integers(0, 1000))
def test_the_slowest_of_many_gumbel_draws_is_as_late_as_predicted(workers, seed):
    rng = random.Random(seed)
    scale = 0.05
    step = predict_step(make(gradient_bytes=0, straggler=scale), workers)

    def draw():
        return -scale * math.log(-math.log(rng.random()))

    trials = 4000
    for take in (fmean, median):
        one = take(draw() for _ in range(trials))
        slowest = take(max(draw() for _ in range(workers)) for _ in range(trials))
        assert step.straggler_s == pytest.approx(slowest - one, abs=0.008)


def test_cost_and_throughput():
    point = predict_point(make(gradient_bytes=0, batch=50, price_per_worker_hour=3.6), 4)
    # 50 samples each in 50 s: 4 a second, for 4 workers at 3.6 an hour: 0.001 each and second.
    assert point.samples_per_s == pytest.approx(4)
    assert point.global_batch == 200
    assert point.cost_per_million_samples == pytest.approx(1000)
    strong = predict_point(make(gradient_bytes=0, batch=50, scaling="strong"), 4)
    # The slowest has 13 of the 50 samples.
    assert (strong.global_batch, strong.step.step_s) == (50, pytest.approx(13))
    assert strong.cost_per_million_samples is None


@pytest.mark.parametrize(
    ("changes", "binds"),
    [
        ({}, "computing"),
        ({"between": Link(0.005, 1e12)}, "latency"),
        ({"between": Link(0, 5e7)}, "bandwidth between hosts"),
        ({"between": Link(0, 1e12), "within": Link(0, 5e7)}, "bandwidth within a host"),
        ({"straggler": 0.1}, "stragglers"),
        ({"overhead_s": 0.3}, "overhead"),
    ],
)
def test_what_binds(changes, binds):
    assert predict_point(make(workers_per_host=4, slots_per_host=4, **changes), 16).binds == binds


@pytest.mark.parametrize(
    "changes",
    [
        {"per_sample_s": 0},
        {"per_sample_s": math.nan},
        {"overlap": 1.1},
        {"overlap": math.nan},
        {"straggler": -0.1},
        {"gradient_bytes": math.inf},
        {"bucket_bytes": 0},
        {"batch": 0},
        {"workers_per_host": 0},
        {"price_per_worker_hour": -1},
        {"scaling": "sideways"},
        {"algorithm": "tree"},
    ],
)
def test_numbers_that_no_training_has_are_refused(changes):
    with pytest.raises(HvdkitError, match="|".join(("must be", "share", "no time", "one of"))):
        make(**changes)


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(HvdkitError, match="batch of 8 cannot be divided among 16"):
        predict_step(make(scaling="strong", batch=8), 16)
