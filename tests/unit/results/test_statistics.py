"""Ratios and their intervals, against values that are known without the code."""

import math
import random

import pytest

from hvdkit.results.statistics import estimate_geometric_mean, estimate_ratio


def test_equal_rounds_leave_no_doubt():
    interval = estimate_ratio([0.75] * 8)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.75, 0.75, 0.75))


def test_the_estimate_is_the_median_round():
    assert estimate_ratio([0.5, 9.0, 0.7]).estimate == pytest.approx(0.7)
    assert estimate_ratio([0.5, 0.9, 0.7, 0.6]).estimate == pytest.approx(0.65)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    rng = random.Random(1)
    true_ratio, trials = 0.8, 100
    covered = 0
    for trial in range(trials):
        rounds = [true_ratio * math.exp(rng.gauss(0, 0.1)) for _ in range(21)]
        interval = estimate_ratio(rounds, seed=trial)
        assert interval.low <= interval.estimate <= interval.high
        covered += interval.low <= true_ratio <= interval.high
    assert 85 <= covered <= trials


def test_noisier_rounds_give_a_wider_interval():
    calm, noisy = [0.9 + 0.01 * i for i in range(10)], [0.4 + 0.1 * i for i in range(10)]
    width = {name: estimate_ratio(r) for name, r in {"calm": calm, "noisy": noisy}.items()}
    assert width["noisy"].high - width["noisy"].low > width["calm"].high - width["calm"].low


def test_groups_count_equally_whatever_their_number_of_rounds():
    interval = estimate_geometric_mean({"a": [0.5] * 3, "b": [2.0] * 30, "c": [1.0]})
    assert interval.estimate == pytest.approx(1.0)
    assert interval.low == pytest.approx(1.0)


def test_the_same_samples_give_the_same_interval():
    rounds = [0.7, 0.9, 0.8, 1.2, 0.6]
    assert estimate_ratio(rounds) == estimate_ratio(rounds)


@pytest.mark.parametrize("ratios", [[], [1.0, 0.0], [1.0, -2.0], [math.nan], [math.inf]])
def test_what_is_no_ratio_is_refused(ratios):
    with pytest.raises(ValueError, match="ratios"):
        estimate_ratio(ratios)


def test_no_groups_are_refused():
    with pytest.raises(ValueError, match="no ratios"):
        estimate_geometric_mean({})
