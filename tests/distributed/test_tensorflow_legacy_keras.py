"""The TensorFlow adapter with Keras 2, from the package tf_keras."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_legacy_keras.py")


@pytest.fixture(scope="module")
def run():
    return launch(WORKER, env={"TF_USE_LEGACY_KERAS": "1"})


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
