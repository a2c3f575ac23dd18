"""What may be fitted together, and what is taken from results."""

import copy
import random

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.profile.measured import collect, resample
from tests.unit.profile.simulation import Cluster, allreduce, machine, train

SMALL = {"rounds": 2, "steps": 2}


@pytest.fixture(scope="module")
def results():
    """One result of each driver."""
    cluster = Cluster()
    return {"t.json": train(cluster, (1, 2), **SMALL), "a.json": allreduce(cluster, (2,))}


def test_samples_are_found_by_workers_and_samples(results):
    measured = collect(results)
    assert set(measured.alone) == set(measured.together) == {(1, 32), (2, 32)}
    assert set(measured.messages) == {(2, size) for size in (1 << 12, 1 << 18, 1 << 22, 1 << 25)}
    assert measured.gradient_bytes == 4 * Cluster().parameters
    assert (measured.slots, measured.hosts, measured.scaling) == (4, 1, "weak")


def test_passes_count_and_compression_shrinks():
    changes = {"accumulate": 2, "batch": 16, "compression": "bf16", "threads": 2}
    measured = collect({"t": train(Cluster(), (1, 2), **SMALL, **changes)})
    # What counts is the samples of a step, of all its passes.
    assert set(measured.together) == {(1, 32), (2, 32)}
    assert measured.gradient_bytes == 2 * Cluster().parameters
    assert measured.slots == 2
    assert collect({"t": train(Cluster(), (1,), **SMALL, dtype="float16")}).gradient_bytes == (
        2 * Cluster().parameters
    )


def test_slots_are_the_accelerators_where_there_are_some(results):
    result = copy.deepcopy(results["t.json"])
    result["machine"]["accelerators"] = ["GPU"] * 8
    assert collect({"t": result}).slots == 8


def test_rounds_of_the_same_steps_are_put_together(results):
    again = {**results, "again.json": train(Cluster(), (1, 2), **SMALL, seed=7)}
    assert len(collect(again).together[2, 32]) == 2 * SMALL["rounds"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cores": 8}, "cores"),
        ({"processor": "other"}, "processor"),
        ({"accelerators": ["GPU"]}, "accelerators"),
        ({"versions": {"hvdkit": "0", "torch": "3"}}, "torch"),
    ],
)
def test_results_of_other_machines_are_refused(results, changes, word):
    other = copy.deepcopy(results["a.json"])
    other["machine"] = machine(Cluster(), **changes)
    with pytest.raises(HvdkitError, match=rf"t.json and a.json .*\({word} differ\)"):
        collect({"t.json": results["t.json"], "a.json": other})


def test_another_version_of_hvdkit_is_the_same_machine(results):
    other = copy.deepcopy(results["a.json"])
    other["machine"]["versions"]["hvdkit"] = "1"
    collect({"t.json": results["t.json"], "a.json": other})


@pytest.mark.parametrize(
    "name", ["model", "framework", "threads", "dtype", "accumulate", "compression", "input"]
)
def test_other_settings_are_refused(results, name):
    value = {"threads": 2, "accumulate": 2}.get(name, "other")
    other = train(Cluster(), (4,), **SMALL, **{name: value})
    with pytest.raises(HvdkitError, match=f"several values of {name}"):
        collect({**results, "other": other})


def test_one_of_several_models_is_chosen(results):
    other = train(Cluster(), (4,), **SMALL, model="other")
    both = {**results, "other": other}
    assert set(collect(both, model="other").together) == {(4, 32)}
    assert set(collect(both, model="layers").together) == {(1, 32), (2, 32)}
    with pytest.raises(HvdkitError, match="no result has steps of hvdkit on model none"):
        collect(both, model="none")


def test_drivers_that_say_nothing_about_this_are_refused(results):
    other = {**results["t.json"], "driver": "converge"}
    with pytest.raises(HvdkitError, match="'converge'"):
        collect({"c": other})


def test_durations_must_be_positive(results):
    other = copy.deepcopy(results["t.json"])
    other["series"][1]["samples"][0][0][0] = 0.0
    with pytest.raises(HvdkitError, match=r"x: step_s holds a duration that is not above 0"):
        collect({"x": other})


def test_an_unknown_type_has_no_size():
    measured = collect({"t": train(Cluster(), (1,), **SMALL, dtype="float8")})
    with pytest.raises(HvdkitError, match=r"float8.*--dtype-bytes"):
        _ = measured.gradient_bytes


def test_rounds_are_drawn_with_replacement_and_in_pairs():
    cluster = Cluster()
    measured = collect({"t": train(cluster, (1, 2), rounds=8, steps=1)})
    drawn = resample(measured, random.Random(0))

    def places(name, key):
        known = [rounds for rounds in getattr(measured, name)[key]]
        return [known.index(rounds) for rounds in getattr(drawn, name)[key]]

    first = places("together", (2, 32))
    assert len(first) == 8
    assert len(set(first)) < 8
    assert first == places("alone", (2, 32)) == places("alone", (1, 32))
