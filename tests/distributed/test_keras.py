"""hvdkit.keras on both of its backends; see the worker files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

TOPICS = (
    "keras",
    "keras_options",
    "keras_callbacks",
    "keras_saving",
    "keras_checkpoint",
    "keras_mixed_precision",
    "keras_growth",
)
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
def test_check(runs, tmp_path_factory, worker, check, backend):
    if (worker, backend) not in runs:
        scratch = tmp_path_factory.mktemp(worker.stem)
        env = {"KERAS_BACKEND": backend, "HVDKIT_TEST_SCRATCH": str(scratch)}
        runs[worker, backend] = launch(worker, env=env, timeout_s=300)
    runs[worker, backend].require(check)


def test_a_keras_that_is_too_old_is_refused_on_tensorflow():
    """Its optimizers would train without ever reaching the reduction."""
    done = subprocess.run(
        [sys.executable, "-c", "import keras; keras.__version__ = '3.4.1'; import hvdkit.keras"],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "hvdkit needs Keras 3.5 or later, and 3.4.1 is installed" in done.stderr
    assert "pip install --upgrade keras" in done.stderr
