"""Gradients that come, stay and go in other ways than a plain loop's; see worker_gradients.py."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_gradients.py")


@pytest.fixture(scope="module", params=["8", "1e-5"], ids=["in buckets", "each alone"])
def run(request):
    return launch(WORKER, env={"HVDKIT_TEST_BUCKET_SIZE_MB": request.param})


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
