"""A run that was interrupted goes on as if it had not been; see worker_resume.py."""

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORKER = Path(__file__).with_name("worker_resume.py")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Launch some checks of the worker file, all in one directory."""
    env = {"HVDKIT_TEST_SCRATCH": str(tmp_path_factory.mktemp("resume"))}
    return lambda np, *checks: launch(WORKER, np, checks, env)


def test_a_killed_run_goes_on_to_the_last_bit(start):
    """The loss curve of each worker equals that of a run that nothing interrupted."""
    first = start(2, "check_saving_changes_nothing", "check_every_worker_is_killed")
    assert first.passed == ["check_saving_changes_nothing"], first.explain("the first run failed")
    assert first.exit_code not in (0, None), first.explain("the workers were not killed")
    assert not first.failed, first.explain("the workers failed before they were killed")
    second = start(2, "check_a_killed_run_goes_on_to_the_last_bit")
    second.require("check_a_killed_run_goes_on_to_the_last_bit")


def test_two_three_and_one_workers_see_each_sample_once_in_an_epoch(start):
    for np, check in (
        (2, "check_a_run_stops_in_the_middle_of_an_epoch"),
        (3, "check_another_number_of_workers_finishes_the_epoch"),
        (1, "check_one_worker_ends_the_epoch"),
    ):
        start(np, check).require(check)
