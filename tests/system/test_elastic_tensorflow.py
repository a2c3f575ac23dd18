"""Elastic jobs of Keras and TensorFlow on several loopback "hosts"; see test_elastic_torch.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.elastic import change_hosts, demand_whole, starting, survive
from tests.system.loopback import HOSTS, serve

SCRIPT = Path(__file__).with_name("elastic_tensorflow.py")


@pytest.fixture(scope="module")
def loopback(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def start(loopback, tmp_path):
    with starting(loopback, tmp_path, SCRIPT) as start:
        yield start


def test_workers_are_killed(start):
    jobs = [
        ([(1, 9, "forward", 0), (0, 17, "commit", 0)], {"ELASTIC_LOOP": "fit"}),
        ([(0, 7, "backward", 0), (2, 14, "gather", 0.002)], {"ELASTIC_LOOP": "tape"}),
    ]
    survive(start, jobs, width=512)


def test_hosts_come_and_go_and_keras_on_pytorch_loses_one(start):
    other = start(HOSTS[:2], [2, 1], deaths=[(0, 9, "forward", 0)], KERAS_BACKEND="torch")
    change_hosts(start)
    assert demand_whole(other, HOSTS[1:2])["sizes"] == [2, 1]
