"""What ranks measure and hold, compared and averaged; see worker_metrics.py."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_metrics.py")


@pytest.fixture(scope="module")
def run():
    return launch(WORKER)


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
