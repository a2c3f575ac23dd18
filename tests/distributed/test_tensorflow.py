"""The TensorFlow adapter: tapes, optimizers, state, names and errors."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKERS = sorted(Path(__file__).parent.glob("worker_tensorflow*.py"))
CHECKS = [(worker, check) for worker in WORKERS for check in check_names(worker)]


@pytest.fixture(scope="module")
def runs():
    """Each worker file's run, made when its first check is asked for."""
    made = {}

    def run(worker):
        if worker not in made:
            made[worker] = launch(worker, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
        return made[worker]

    return run


@pytest.mark.parametrize(
    ("worker", "check"), CHECKS, ids=[f"{w.stem.removeprefix('worker_')}-{c}" for w, c in CHECKS]
)
def test_check(runs, worker, check):
    runs(worker).require(check)
