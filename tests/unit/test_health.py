"""Options of a monitor and what its policy decides."""

from dataclasses import replace

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.health import HealthOptions, NonFinitePolicy

OPTIONS = HealthOptions("skip", 0.5, 10, 3, 50, 1.5, 10.0)


def test_policies():
    policy = NonFinitePolicy("skip", max_skips=2)
    assert [policy.decide() for _ in range(3)] == ["skip", "skip", "raise"]
    assert "after 2 skipped updates in a row" in policy.explain()
    policy.accept()
    assert policy.decide() == "skip"
    policy = NonFinitePolicy("rollback", max_rollbacks=1)
    assert policy.decide() == "rollback"
    policy.accept()
    assert policy.decide() == "raise"
    assert "after 1 rollbacks" in policy.explain()
    assert NonFinitePolicy("raise").decide() == "raise"
    for wrong in ({"action": "ignore"}, {"action": "skip", "max_skips": -1}):
        with pytest.raises(HvdkitError, match="not"):
            NonFinitePolicy(**wrong)


def test_a_policy_counts_how_often_the_run_went_back_to_each_step():
    policy = NonFinitePolicy("rollback")
    assert [policy.count_return(step) for step in (5, 5, 8, 5)] == [0, 1, 0, 2]


def test_options_are_listed_and_lead_to_policy_and_detectors():
    policy, _ = OPTIONS.build(has_store=False)
    assert (policy.action, policy.max_skips, policy.max_rollbacks) == ("skip", 10, 3)
    assert replace(OPTIONS, nonfinite=None).build(has_store=False)[0] is None
    assert replace(OPTIONS, nonfinite="rollback").build(has_store=True)[0].action == "rollback"
    listed = dict(OPTIONS.describe())
    assert (listed["nonfinite"], listed["window"], len(listed)) == ("skip", "50", 7)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nonfinite": "rollback"}, "needs store="),
        ({"nonfinite": "ignore"}, "must be one of skip, raise, rollback"),
        ({"learning_rate_factor": 1.5}, "learning_rate_factor must be above 0 and at most 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"spike_factor": 1.0}, "spike_factor must be above 1"),
    ],
)
def test_options_that_do_not_fit(wrong, message):
    with pytest.raises(HvdkitError, match=message):
        replace(OPTIONS, **wrong).build(has_store=False)
