"""Goals of a benchmark: how they are written, and when they are missed."""

import pytest

from hvdkit.bench.goals import Goal, find_missed, find_unmeasured, parse_goal
from hvdkit.errors import HvdkitError

RUN = {"candidate": "hvdkit", "model": "mlp", "scaling_efficiency": 0.8, "input_share": None}
SUMMARY = {
    "runs": [
        {**RUN, "workers": 1, "scaling_efficiency": None},
        {**RUN, "workers": 4},
        {**RUN, "workers": 4, "candidate": "ddp", "scaling_efficiency": 0.1},
    ],
    "ratios": [
        {"model": "mlp", "workers": 4, "candidate": "hvdkit", "reference": "ddp", "estimate": 1.1},
        {"model": "mlp", "workers": 1, "candidate": "hvdkit", "reference": "ddp", "estimate": 0.1},
    ],
}


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("scaling_efficiency>=0.8", Goal("scaling_efficiency", ">=", 0.8)),
        (" step_time_p95_s < 2e-1 ", Goal("step_time_p95_s", "<", 0.2)),
        ("ratio_to_ddp<=1", Goal("ratio_to_ddp", "<=", 1.0)),
    ],
)
def test_a_goal_is_read(text, goal):
    assert parse_goal(text) == goal


@pytest.mark.parametrize("text", ["", "speed", "samples_per_s=3", "step_time_s<=fast", "a b>1"])
def test_what_is_no_goal_is_refused(text):
    with pytest.raises(HvdkitError, match="is no goal; write one like"):
        parse_goal(text)


def test_an_unknown_metric_is_refused_with_those_that_there_are():
    with pytest.raises(HvdkitError, match="speed is no metric; known are samples_per_s"):
        parse_goal("speed>1")


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        ("scaling_efficiency>=0.8", []),
        ("scaling_efficiency>0.8", ["scaling_efficiency>0.8: 0.8 on mlp with 4 worker(s)"]),
        ("ratio_to_ddp<=1", ["ratio_to_ddp<=1: 1.1 on mlp with 4 worker(s)"]),
        ("ratio_to_mwms<=1", ["ratio_to_mwms<=1: was not measured on mlp"]),
        ("input_share<=1", ["input_share<=1: was not measured on mlp"]),
    ],
)
def test_goals_hold_for_the_most_workers(text, missed):
    assert find_missed([parse_goal(text)], SUMMARY) == missed


@pytest.mark.parametrize(
    ("text", "workers", "need"),
    [
        ("scaling_efficiency>=0.8", (4,), "two numbers of workers in --np"),
        ("scaling_efficiency>=0.8", (1, 4), None),
        ("communication_share<0.1", (1,), "more than one worker in --np"),
        ("communication_share<0.1", (4,), None),
        ("input_share<0.1", (1, 4), "--input"),
        ("cost_per_million_samples<1", (1, 4), "--price-per-worker-hour"),
        ("ratio_to_mwms<1", (1, 4), "mwms in --against"),
        ("ratio_to_ddp<1", (1, 4), None),
        ("step_time_s<1", (1,), None),
    ],
)
def test_a_goal_that_nothing_will_be_known_about_is_found_before(text, workers, need):
    goals = [parse_goal("samples_per_s>1"), parse_goal(text)]
    problem = find_unmeasured(goals, workers, ("ddp", "single"), has_input=False, has_price=False)
    assert problem == (need and f"the goal {parse_goal(text)} needs {need}")


def test_what_is_given_can_be_a_goal():
    goals = [parse_goal("input_share<1"), parse_goal("cost_per_million_samples<1")]
    assert find_unmeasured(goals, (1,), (), has_input=True, has_price=True) is None
