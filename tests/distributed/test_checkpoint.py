"""Save on rank 0, restore everywhere; see worker_checkpoint.py."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_checkpoint.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("checkpoints")
    return launch(WORKER, env={"HVDKIT_TEST_SCRATCH": str(scratch)})


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
