"""Buffers of Keras, with two workers, on both backends."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_keras_buffers.py")


@pytest.fixture(scope="module", params=["tensorflow", "torch"])
def run(request):
    return launch(WORKER, env={"KERAS_BACKEND": request.param})


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
