"""Detectors, fed with figures whose answer is known."""

import math
import random

import pytest

from hvdkit.detectors import (
    Detectors,
    Figures,
    LossSpikeDetector,
    MemoryGrowthDetector,
    StragglerDetector,
    read_resident_bytes,
)
from hvdkit.errors import HvdkitError

MIB = 2**20


def losses(count, seed=0):
    rng = random.Random(seed)
    return [2 + rng.gauss(0, 0.1) for _ in range(count)]


def feed(detector, values, first=0):
    return [f for step, value in enumerate(values, first) for f in detector.add(step, value)]


def test_a_spike_is_found_once_and_the_next_one_again():
    detector = LossSpikeDetector()
    assert feed(detector, losses(200)) == []
    [found] = feed(detector, [9.0, 12.0, 30.0], first=200)
    assert (found.kind, found.step, found.details["loss"]) == ("loss_spike", 200, 9.0)
    assert found.details["median"] == pytest.approx(2, abs=0.05)
    assert 2.5 < found.details["limit"] < 4
    assert feed(detector, losses(5), first=203) == []
    assert [f.step for f in feed(detector, [9.0], first=208)] == [208]


def test_what_is_no_spike():
    falling = [10 * 0.98**step for step in range(300)]
    assert feed(LossSpikeDetector(), falling) == []
    assert feed(LossSpikeDetector(), [1.0] * 200 + [1.005] * 200) == []  # hardly a change
    assert feed(LossSpikeDetector(warmup=20), [1.0] * 19 + [100.0]) == []
    assert feed(LossSpikeDetector(), [*losses(50), math.nan, math.inf]) == []


def test_a_new_level_is_one_spike():
    assert len(feed(LossSpikeDetector(window=50), losses(100) + [9 + x for x in losses(200)])) == 1


def test_a_straggler_is_named_once_an_episode():
    detector = StragglerDetector(1.5)
    usual = {0: 0.10, 1: 0.11, 2: 0.09, 3: 0.10}
    assert detector.add(50, usual) == []
    [found] = detector.add(100, usual | {2: 0.20})
    assert (found.kind, found.rank, found.step) == ("straggler", 2, 100)
    assert found.details == {"own_s": 0.20, "median_s": 0.10}
    assert detector.add(150, usual | {2: 0.25}) == []
    assert detector.add(200, usual) == []
    assert [f.rank for f in detector.add(250, usual | {2: 0.20})] == [2]


def test_of_two_ranks_the_slower_is_found():
    [found] = StragglerDetector(1.5).add(1, {0: 0.16, 1: 0.1})
    assert found.rank == 0


def test_what_is_no_straggler():
    assert StragglerDetector(1.5).add(1, {0: 0.14, 1: 0.1}) == []
    assert StragglerDetector(1.5).add(1, {0: 0.0009, 1: 0.0001}) == []  # too little to matter
    assert StragglerDetector(1.5).add(1, {0: 5.0}) == []


def grow(sizes, **options):
    detector = MemoryGrowthDetector(**options)
    return [
        found
        for number, size in enumerate(sizes)
        for found in detector.add(50 * number, 1, "the memory", size * MIB)
    ]


def test_growing_memory_is_found_once():
    rng = random.Random(1)
    [found] = grow([1000 + 20 * n + rng.uniform(-5, 5) for n in range(40)])
    assert (found.kind, found.rank, found.step) == ("memory_growth", 1, 50 * 11)
    assert found.details["bytes_per_step"] == pytest.approx(20 * MIB / 50, rel=0.1)
    assert "grows by" in found.message


def test_what_is_no_growth():
    assert grow([100, 500, *[1000] * 30]) == []  # at the start
    assert grow([1000] * 15 + [3000] * 30) == []  # one jump
    assert grow([1000 + 500 * (n % 3) for n in range(40)]) == []  # up and down
    assert grow([1000 + 2 * n for n in range(40)]) == []  # little
    assert grow([math.nan] * 40) == []


def test_detectors_judge_the_mean_loss_of_each_step_over_the_ranks():
    detectors = Detectors()

    def window(values):
        return {rank: Figures(0.2, 0.1, 1e9, 0, tuple(values)) for rank in range(2)}

    assert detectors.add(49, window(losses(50))) == []
    figures = window([2.0] * 30 + [50.0] + [2.0] * 19)
    figures[1] = Figures(0.2, 0.1, 1e9, 0, (math.nan,) * 30 + (70.0,) + (2.0,) * 19)
    [found] = detectors.add(99, figures)
    assert (found.step, found.details["loss"]) == (80, 60.0)
    with pytest.raises(HvdkitError, match="straggler_factor must be above 1"):
        Detectors(straggler_factor=1.0)


def test_figures():
    figures = Figures(0.4, 0.1, 1.0, 0.0, (1.0, math.nan, 3.0))
    assert (figures.wait_share, figures.loss) == (0.75, 2.0)
    assert math.isnan(Figures(0.4, 0.1, 1.0, 0.0).loss)


def test_resident_memory_is_read():
    before = read_resident_bytes()
    held = bytearray(b"x" * (50 * MIB))
    assert 40 * MIB < read_resident_bytes() - before < 80 * MIB
    assert len(held)
