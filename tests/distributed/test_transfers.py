"""All-reduces through the peers' memory, and through sockets where that is not to be had."""

import re
from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_transfers.py")
SAID = "Large tensors are reduced through "
WAYS = [("memory", 2), ("memory", 3), ("sockets", 2), ("forbidden", 2)]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def way(request):
    name, size = request.param
    done = launch(WORKER, args=[name], np=size, env={"HOROVOD_LOG_LEVEL": "info"})
    return name, done


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(way, check):
    way[1].require(check)


def test_the_way_is_the_expected_one(way):
    name, done = way
    taken, other = "the peers' memory", "sockets"
    if name != "memory":
        taken, other = other, taken
    assert SAID + taken in done.output
    assert SAID + other not in done.output


def test_what_a_rank_reads_too_late_is_an_error_and_no_sum():
    done = launch(WORKER, args=["left_behind"], np=6, timeout_s=120)
    right = re.findall(r"rank \d has 6\.0 to 6\.0", done.output)
    told = re.findall(r"rank \d was told", done.output)
    assert len(set(right + told)) == 6, done.explain("a rank has a wrong sum, or never ended")


def test_a_lost_rank_is_an_error_on_the_others():
    done = launch(WORKER, args=["lose_a_rank"], timeout_s=60)
    assert done.exit_code not in (0, None), done.explain("the job should have failed by itself")
    assert "rank 0 was told" in done.output, done.explain("rank 0 was not told")
