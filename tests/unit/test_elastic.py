"""Tests of what follows the number of workers."""

import math

import pytest

from hvdkit.elastic import ATTEMPTS, choose_passes, rate_change, restart
from hvdkit.errors import HvdkitError


@pytest.mark.parametrize(
    ("batches", "workers", "passes"),
    [(4, 4, 1), (4, 2, 2), (4, 1, 4), (4, 3, 1), (4, 8, 1), (12, 5, 2), (3, 2, 2), (1, 1, 1)],
)
def test_passes_keep_the_batch_as_nearly_as_they_can(batches, workers, passes):
    assert choose_passes(batches, workers) == passes
    if batches >= workers:
        assert abs(passes * workers - batches) <= workers / 2


@pytest.mark.parametrize(("batches", "workers"), [(0, 1), (1, 0), (-2, 3)])
def test_nobody_to_train_is_an_error(batches, workers):
    with pytest.raises(HvdkitError, match=f"got {batches} and {workers}"):
        choose_passes(batches, workers)


def test_rates_follow_the_batch():
    assert rate_change(2, 3, "linear") == 1.5
    assert rate_change(4, 1, "sqrt") == 0.5
    assert rate_change(3, 7, "none") == 1.0
    assert math.isclose(rate_change(2, 3, "sqrt") * rate_change(3, 2, "sqrt"), 1.0)
    with pytest.raises(HvdkitError, match="unknown scaling rule"):
        rate_change(2, 3, "cubic")


def fail(calls, errors):
    def init():
        calls.append("init")
        if errors:
            raise ValueError(errors.pop(0))

    return init


def test_workers_that_are_left_try_again():
    calls = []
    restart(lambda: calls.append("shutdown"), fail(calls, ["rank 2 is gone", "rank 1 is gone"]))
    assert calls == ["shutdown", "init"] * 3


def test_they_do_not_try_for_ever():
    calls = []
    with pytest.raises(ValueError, match="gone"):
        restart(lambda: None, fail(calls, ["gone"] * 100))
    assert calls == ["init"] * ATTEMPTS


def test_who_is_removed_leaves_at_once():
    calls = []
    with pytest.raises(SystemExit, match="left the elastic job"):
        restart(lambda: None, fail(calls, ["b[0] has been removed from elastic job"] * 2))
    assert calls == ["init"]
