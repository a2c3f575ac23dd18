"""Two workers on halves of the batches end where one process ends, whatever the options."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_equivalence.py")


@pytest.fixture(scope="module")
def run():
    return launch(WORKER)


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
