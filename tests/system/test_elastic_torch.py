"""Elastic jobs on several loopback "hosts": workers die, leave and join while they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.elastic import change_hosts, demand_whole, starting, survive
from tests.system.loopback import HOSTS, serve

SCRIPT = Path(__file__).with_name("elastic_torch.py")
# Two jobs at a time; rank 0, on the first host, writes the checkpoints.
DEATHS = {
    "forward-reduction-and-backward-update": (
        [(1, 9, "forward", 0), (0, 17, "reduction", 0.03)],
        [(2, 6, "backward", 0), (1, 14, "update", 0)],
    ),
    "gather-commit-and-saving-pause": (
        [(0, 8, "gather", 0.002), (2, 15, "commit", 0)],
        [(0, 10, "saving", 0.004), (1, 16, "pause", 0.006)],
    ),
}


@pytest.fixture(scope="module")
def loopback(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def start(loopback, tmp_path):
    with starting(loopback, tmp_path, SCRIPT) as start:
        yield start


@pytest.mark.parametrize("moments", DEATHS)
def test_workers_are_killed(start, moments):
    survive(start, [(deaths, {}) for deaths in DEATHS[moments]], width=1024)


def test_one_dies_while_the_others_start_anew(start):
    deaths = [(1, 9, "forward", 0), (2, 9, "restart", 0.05)]
    # How long the others wait for it; all start within that time, too.
    job = start(HOSTS, [1], deaths, HOROVOD_GLOO_TIMEOUT_SECONDS="15")
    assert demand_whole(job, HOSTS[:1])["sizes"][-1] == 1


def test_hosts_come_and_go_and_the_batch_is_kept(start):
    job = change_hosts(start, ELASTIC_PASSES="6")
    for name, passes in (("size-1-0", 6), ("size-2-1", 3), ("size-3-2", 2), ("size-2-3", 3)):
        assert job.wait_for(f"{name}.json", timeout_s=0)["passes"] == passes
