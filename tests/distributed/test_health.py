"""What is not finite on one rank, rollback, stragglers; see the two worker files."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

TORCH = Path(__file__).with_name("worker_health.py")
KERAS = Path(__file__).with_name("worker_keras_health.py")
RUNS = {
    "2 workers": (TORCH, 2, {}),
    "3 workers": (TORCH, 3, {}),
    "Keras on TensorFlow": (KERAS, 2, {"KERAS_BACKEND": "tensorflow"}),
    "Keras on TensorFlow, 3 workers": (KERAS, 3, {"KERAS_BACKEND": "tensorflow"}),
    "Keras on PyTorch": (KERAS, 2, {"KERAS_BACKEND": "torch"}),
}


@pytest.fixture(scope="module")
def runs():
    """Runs by name, each launched when its first check is asked for."""
    return {}


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name, (worker, _, _) in RUNS.items() for check in check_names(worker)],
)
def test_check(runs, name, check, tmp_path_factory):
    if name not in runs:
        worker, np, env = RUNS[name]
        env = {"HVDKIT_TEST_SCRATCH": str(tmp_path_factory.mktemp("health")), **env}
        runs[name] = launch(worker, np=np, env=env)
    runs[name].require(check)
