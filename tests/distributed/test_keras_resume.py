"""Runs of Keras that were interrupted go on as if they had not been; see the worker file."""

import shutil
from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORKER = Path(__file__).with_name("worker_keras_resume.py")


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_an_interrupted_run_goes_on_to_the_last_bit(tmp_path, backend):
    """Loss curves and metrics equal those of runs that nothing interrupted; then on three."""
    env = {"HVDKIT_TEST_SCRATCH": str(tmp_path), "KERAS_BACKEND": backend}
    before = [
        "check_saving_changes_nothing",
        "check_the_best_of_the_epochs_is_kept",
        "check_runs_are_interrupted",
        "check_other_data_and_options_are_refused",
        "check_saves_wait_until_accumulated_gradients_are_applied",
        "check_a_store_that_cannot_be_written_is_an_error_on_every_rank",
    ]
    first = launch(WORKER, 2, [*before, "check_every_worker_is_killed"], env)
    assert first.passed == before, first.explain("the first runs failed")
    assert not first.failed, first.explain("the workers failed before they were killed")
    assert first.exit_code not in (0, None), first.explain("the workers were not killed")
    shutil.copytree(tmp_path / "arrays", tmp_path / "sizes")
    after = [
        "check_interrupted_runs_go_on_to_the_last_bit",
        "check_a_run_that_is_done_does_nothing",
    ]
    second = launch(WORKER, 2, after, env)
    for check in after:
        second.require(check)
    if backend == "torch":
        launch(WORKER, 3, ["check_three_workers_go_on_from_two"], env).require(
            "check_three_workers_go_on_from_two"
        )
