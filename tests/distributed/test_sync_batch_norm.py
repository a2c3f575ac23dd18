"""SyncBatchNorm against one process on the concatenated batch; see worker_sync_batch_norm.py."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_sync_batch_norm.py")


@pytest.fixture(scope="module")
def run():
    return launch(WORKER)


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
