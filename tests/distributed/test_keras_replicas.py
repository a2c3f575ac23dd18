"""Agreement at start and checks of replicas, see worker_keras_replicas.py."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_keras_replicas.py")
JOBS = [("tensorflow", 2), ("tensorflow", 3), ("torch", 2)]


@pytest.fixture(scope="module", params=JOBS, ids=[f"{name}, {np} workers" for name, np in JOBS])
def run(request, tmp_path_factory):
    backend, np = request.param
    scratch = tmp_path_factory.mktemp("replicas")
    env = {"KERAS_BACKEND": backend, "HVDKIT_TEST_SCRATCH": str(scratch)}
    return launch(WORKER, np=np, env=env)


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
