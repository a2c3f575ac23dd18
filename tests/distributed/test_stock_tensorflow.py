"""What stock Horovod gets wrong on today's TensorFlow and Keras; see the worker file."""

from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_stock_tensorflow.py")


@pytest.fixture(scope="module")
def run():
    return launch(WORKER)


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(run, check):
    run.require(check)
