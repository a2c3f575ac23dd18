"""The account of a replica's memory, by arithmetic; ``tests/system/test_memory.py`` measures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.bench.memory import (
    Replica,
    Settings,
    describe,
    find_largest_batch,
    make_replica,
    plan_passes,
)
from hvdkit.bench.models import MODELS
from hvdkit.errors import HvdkitError
from hvdkit.results.files import check_result

COUNTED = {
    "parameters": 1000,
    "buffers": 10,
    "gradients": 900,
    "reduction": 50,
    "optimizer": 1800,
    "activations": 600,
    "batch": 8,
    "peaks": [[4, 500], [8, 900]],
    "device": "CPU",
    "available": 10_000,
    "peak_measured": True,
}
LASTING = 1000 + 10 + 900 + 50 + 1800


def test_two_peaks_tell_what_grows_with_the_samples():
    replica = make_replica(COUNTED)
    # 100 bytes a sample, and 100 whatever the batch.
    assert (replica.step_per_sample, replica.step_fixed) == (100, 100)
    assert replica.lasting == LASTING
    assert replica.total(8) == LASTING + 900
    assert replica.total(1) == LASTING + 200
    assert sum(replica.parts.values()) == replica.total(8)
    assert replica.parts["activations"] == 600
    assert replica.parts["else at the peak of a step"] == 300


def test_a_peak_that_does_not_grow_is_the_same_for_all_batches():
    replica = make_replica({**COUNTED, "peaks": [[4, 900], [8, 880]]})
    assert (replica.step_per_sample, replica.step_fixed) == (0, 880)
    assert find_largest_batch(replica, 1 << 20) is None


def test_passes_halve_the_samples_down_to_one():
    plans = plan_passes(make_replica(COUNTED), LASTING + 100 + 250)
    assert [(plan.passes, plan.samples, plan.fits) for plan in plans] == [
        (1, 8, False),
        (2, 4, False),
        (4, 2, True),
        (8, 1, True),
    ]
    assert plans[2].total_bytes == LASTING + 300
    assert all(plan.fits is None for plan in plan_passes(make_replica(COUNTED), None))


@given(st.integers(0, 20_000), st.integers(1, 100))
def test_the_largest_batch_is_the_last_that_fits(room, batch):
    replica = make_replica({**COUNTED, "batch": batch})
    largest = find_largest_batch(replica, room)
    if largest == 0:
        assert replica.total(1) > room
    else:
        assert replica.total(largest) <= room < replica.total(largest + 1)
    plans = plan_passes(replica, room)
    # Every plan takes all samples, and those that fit have no more than the largest batch.
    assert all(plan.passes * plan.samples >= batch for plan in plans)
    assert all(plan.fits == (plan.samples <= largest) for plan in plans)


def test_the_result_has_a_series_for_each_part():
    settings, replica = Settings(model="cnn", optimizer="adam"), make_replica(COUNTED)
    result = describe(settings, replica, plan_passes(replica, 10_000), 10_000)
    check_result(result, "here")
    sizes = {one["labels"]["part"]: one["samples"] for one in result["series"]}
    assert sizes == {part: [[[size]]] for part, size in replica.parts.items()}
    assert result["summary"]["fits"] is True
    assert result["summary"]["total_bytes"] == replica.total(8)
    assert Replica(**result["summary"]["replica"]) == replica


def test_the_batch_is_the_models_own_unless_given():
    assert Settings(model="transformer").batch == MODELS["transformer"].batch
    assert Settings(model="transformer", batch=3).batch == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"framework": "jax"}, "framework"),
        ({"model": "gpt"}, "model"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"model": "mine:make"}, "--loss"),
        ({"model": "mine:make", "loss": "mine:loss"}, "--batch-size"),
        ({"batch": 0}, "batch"),
    ],
)
def test_settings_that_do_not_exist_are_refused(changes, words):
    with pytest.raises(HvdkitError, match=words):
        Settings(**changes)
