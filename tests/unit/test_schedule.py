"""Scaling rules and warm-up factors, from their definitions."""

import math

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.schedule import RULES, scaling_factor, warmup_factor


@pytest.mark.parametrize("workers", [1, 2, 7, 1024])
def test_rules(workers):
    assert scaling_factor(workers) == workers
    assert scaling_factor(workers, "linear") == workers
    assert scaling_factor(workers, "sqrt") == pytest.approx(math.sqrt(workers))
    assert scaling_factor(workers, "none") == 1


@pytest.mark.parametrize("rule", RULES)
def test_one_worker_keeps_its_rate_under_every_rule(rule):
    assert scaling_factor(1, rule) == 1


def test_a_misspelt_rule_is_refused_with_the_choices():
    with pytest.raises(HvdkitError, match=r"'Linear'.*linear, sqrt, none"):
        scaling_factor(2, "Linear")


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_is_refused(workers):
    with pytest.raises(HvdkitError, match="at least 1"):
        scaling_factor(workers)


def test_warmup_rises_evenly_from_the_start_to_one():
    factors = [warmup_factor(step, 4, 0.2) for step in range(7)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


def test_no_warmup_is_the_full_rate_at_once():
    assert warmup_factor(0, 0, 0.25) == 1


@pytest.mark.parametrize(
    ("step", "steps", "start"), [(-1, 4, 0.5), (0, -4, 0.5), (0, 4, 0), (0, 4, 1.5)]
)
def test_arguments_out_of_range_are_refused(step, steps, start):
    with pytest.raises(HvdkitError):
        warmup_factor(step, steps, start)
