"""hvdkit.keras on both of its backends; see the worker files."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

TOPICS = ("keras", "keras_options", "keras_callbacks", "keras_saving", "keras_checkpoint")
WORKERS = [Path(__file__).with_name(f"worker_{topic}.py") for topic in TOPICS]


@pytest.fixture(scope="module")
def runs():
    """Runs by worker file and backend, each launched when its first check is asked for."""
    return {}


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.parametrize(
    ("worker", "check"),
    [
        pytest.param(worker, check, id=f"{worker.stem.removeprefix('worker_')}-{check}")
        for worker in WORKERS
        for check in check_names(worker)
    ],
)
def test_check(runs, worker, check, backend):
    if (worker, backend) not in runs:
        runs[worker, backend] = launch(worker, env={"KERAS_BACKEND": backend}, timeout_s=300)
    runs[worker, backend].require(check)
