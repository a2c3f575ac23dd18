"""shard, its sampler, and gather; see worker_data.py."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_data.py")


@pytest.fixture(scope="module")
def run():
    return launch(WORKER, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
