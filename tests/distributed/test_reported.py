"""Faults reported of stock Horovod: each input fails there and is right here."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_reported.py")


@pytest.fixture(scope="module")
def run():
    return launch(WORKER)


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)


def test_c9_an_operation_that_one_rank_never_submits_ends_with_a_message():
    """The stall inspector under Gloo, which Horovod's build is mended for."""
    run = launch(
        Path(__file__).with_name("worker_stalled.py"),
        env={
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
        },
        timeout_s=60,
    )
    assert run.exit_code not in (0, None), run.explain("the job should have ended by itself")
    assert "1: [allreduce.lonely]" in run.output, run.explain("tensor and rank are not named")
    for rank in range(2):
        assert f"rank {rank} was told" in run.output, run.explain("every rank should be told")
