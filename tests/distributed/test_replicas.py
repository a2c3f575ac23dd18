"""Agreement at start and checks of replicas, see worker_replicas.py, at two and three workers."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_replicas.py")


@pytest.fixture(scope="module", params=[2, 3], ids=["2 workers", "3 workers"])
def run(request, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("replicas")
    return launch(WORKER, np=request.param, env={"HVDKIT_TEST_SCRATCH": str(scratch)})


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
