"""The benchmark of convergence: what is tried, in which order samples come, what curves mean."""

import itertools

import pytest

from hvdkit.bench.converge import Settings, Variant, find_first, summarize
from hvdkit.bench.tasks import iterate_batches
from hvdkit.errors import HvdkitError
from hvdkit.results.files import make_series


def make_curves(accuracies, workers=1, **labels):
    labels = {"task": "digits", "workers": workers, **labels}
    seen = [[[10 * (at + 1) for at, _ in enumerate(curve)]] for curve in accuracies]
    spent = [[[0.5 * (at + 1) for at, _ in enumerate(curve)]] for curve in accuracies]
    return [
        make_series("accuracy", "", [[one] for one in accuracies], lower_is_better=False, **labels),
        make_series("samples_seen", "samples", seen, lower_is_better=True, **labels),
        make_series("time_s", "s", spent, lower_is_better=True, **labels),
    ]


def test_the_target_is_reached_at_the_median_of_the_seeds_that_reach_it():
    curves = [[0.5, 0.9, 0.8], [0.9, 0.9, 0.9], [0.1, 0.2, 0.3]]
    (run,) = summarize(make_curves(curves), {"digits": 0.9})["runs"]
    assert (run["seeds"], run["reached"]) == (3, 2)
    assert run["samples_to_target"] == 15
    assert run["time_to_target_s"] == 0.75
    assert run["final_accuracy"] == 0.8


def test_a_target_that_most_seeds_miss_was_not_reached():
    curves = [[0.9], [0.1], [0.1], [0.9]]
    (run,) = summarize(make_curves(curves), {"digits": 0.9})["runs"]
    assert run["reached"] == 2
    assert run["samples_to_target"] is None
    assert run["time_to_target_s"] is None


def test_variants_are_told_apart():
    series = make_curves([[1.0]], workers=1) + make_curves([[0.0]], workers=2)
    runs = summarize(series, {"digits": 0.5})["runs"]
    assert [(run["workers"], run["reached"]) for run in runs] == [(1, 1), (2, 0)]


def test_the_first_time_counts():
    assert find_first([0.1, 0.5, 0.4, 0.6], 0.5) == 1
    assert find_first([0.1], 0.5) is None


def test_every_rule_is_tried_where_the_batch_grows():
    variants = Settings(workers=(1, 4), rules=("linear", "sqrt")).list_variants()
    assert variants == [
        Variant(1, "fixed", "none"),
        Variant(4, "fixed", "none"),
        Variant(4, "scaled", "linear"),
        Variant(4, "scaled", "sqrt"),
    ]


def test_requests_follow_the_rules():
    settings = Settings(workers=(4,), batch=32, learning_rate=0.1)
    found = {
        (one.batch_rule, one.learning_rate_rule): settings.make_request("digits", one, 7)
        for one in settings.list_variants()
    }
    assert found["fixed", "none"]["batch"] == 8
    assert found["fixed", "none"]["learning_rate"] == 0.1
    assert found["scaled", "linear"]["batch"] == 32
    assert found["scaled", "linear"]["learning_rate"] == pytest.approx(0.4)
    assert found["scaled", "sqrt"]["learning_rate"] == pytest.approx(0.2)
    assert found["scaled", "none"]["learning_rate"] == 0.1
    assert {one["seed"] for one in found.values()} == {7}


def test_ranks_together_take_the_samples_of_one_process():
    steps = 2 * (103 // 12)
    alone = itertools.islice(iterate_batches(103, 12, rank=0, size=1, seed=3), steps)
    ranks = [iterate_batches(103, 4, rank=rank, size=3, seed=3) for rank in range(3)]
    for whole in alone:
        assert [index for one in ranks for index in next(one)] == list(whole)


def test_epochs_hold_each_sample_once_and_differ():
    batches = iterate_batches(12, 4, rank=0, size=1, seed=0)
    epochs = [[index for _ in range(3) for index in next(batches)] for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "jax"}, "framework must be distinct names from torch, tensorflow"),
        ({"tasks": ("imagenet",)}, "tasks must be distinct names from digits, text"),
        ({"rules": ("cube",)}, "rules must be distinct names from linear, sqrt, none"),
        ({"workers": (3,)}, "a batch of 32 cannot be divided among 3 workers"),
        ({"workers": (2, 2)}, "numbers of workers must be distinct"),
        ({"batch": 1}, "a batch of 1 cannot be divided among 2 workers"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"target": 95.0}, "an accuracy is above 0 and at most 1; got 95"),
        ({"learning_rate": -1.0}, "a learning rate must be above 0"),
        ({"samples": 10}, "digits is evaluated each 720 samples; got 10"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(options, message):
    with pytest.raises(HvdkitError, match=message):
        Settings(**options)


def test_more_samples_a_step_than_there_are_is_refused():
    with pytest.raises(HvdkitError, match="is more than the 10 samples that there are"):
        next(iterate_batches(10, 6, rank=0, size=2, seed=0))
