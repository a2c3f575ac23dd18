"""Random states go through plain values, and to the ranks that they belong to."""

import json
import random
import sys

import pytest

from hvdkit.random_state import (
    choose_state,
    read_random_state,
    seed_generators,
    set_random_state,
)


def draw():
    numpy = sys.modules.get("numpy")
    others = [float(numpy.random.rand()), float(numpy.random.randn())] if numpy else []
    return [random.random(), random.gauss(0, 1), *others]


@pytest.fixture(params=["python", "numpy"])
def _library(request):
    if request.param == "numpy":
        pytest.importorskip("numpy")


@pytest.mark.usefixtures("_library")
def test_a_state_survives_json_and_brings_back_what_is_drawn():
    draw()  # the second number of a pair of normals is kept for later
    state = json.loads(json.dumps(read_random_state()))
    expected = [draw() for _ in range(3)]
    set_random_state(state)
    assert [draw() for _ in range(3)] == expected


def test_as_many_ranks_get_each_its_own_back():
    states = [{"python": rank} for rank in range(3)]
    assert [choose_state(states, rank, 3) for rank in range(3)] == [
        ({"python": rank}, {}) for rank in range(3)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_another_number_of_ranks_gets_seeds_that_follow_from_the_states(size):
    states = [{"python": [rank], "shared": [7]} for rank in range(3)]
    chosen = [choose_state(states, rank, size) for rank in range(size)]
    assert chosen == [choose_state(states, rank, size) for rank in range(size)]
    assert all(restored == {"shared": [7]} for restored, _ in chosen)
    seeds = {seeds["python"] for _, seeds in chosen}
    assert len(seeds) == size
    assert all(0 <= seed < 2**63 for seed in seeds)
    states[2]["python"] = [9]
    assert not seeds & {choose_state(states, rank, size)[1]["python"] for rank in range(size)}


def test_of_a_single_rank_the_others_do_not_get_copies():
    chosen = [choose_state([{"python": [1]}], rank, 2) for rank in range(2)]
    assert chosen[0][1] != chosen[1][1]


def test_seeds_decide_what_is_drawn():
    seed_generators({"python": 2**62, "numpy": 2**62})
    first = draw()
    seed_generators({"python": 2**62, "numpy": 2**62})
    assert draw() == first
    seed_generators({"python": 1, "numpy": 2})
    assert draw() != first
