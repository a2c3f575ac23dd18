"""The harness must notice every way in which a distributed run can go wrong."""

import os
from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch, run_workers

WORKER = Path(__file__).with_name("worker_harness.py")


def test_a_good_run_reports_every_check_of_the_file():
    assert run_workers(WORKER).passed == check_names(WORKER)
    assert len(check_names(WORKER)) == 3


def test_a_failing_check_fails_alone_and_is_shown():
    run = launch(WORKER, args=["fail"])
    assert run.exit_code != 0
    run.require("check_ranks_sum")
    with pytest.raises(AssertionError, match="rank 1 was told to fail"):
        run.require("check_fails_on_rank_1")
    with pytest.raises(AssertionError, match="check_hangs_on_rank_0 did not pass"):
        run.require("check_hangs_on_rank_0")


def test_a_dying_rank_fails_the_run():
    with pytest.raises(AssertionError, match=r"worker_harness\.py failed"):
        run_workers(WORKER, args=["die"])


def test_a_hang_ends_at_the_deadline_with_its_place_and_no_process_left():
    run = launch(WORKER, args=["hang"], timeout_s=30)
    assert run.exit_code is None
    assert "in check_hangs_on_rank_0" in run.output
    with pytest.raises(AssertionError, match="ended at the deadline"):
        run.require("check_ranks_sum")
    assert not _processes_naming(f"{WORKER} hang".encode())


def _processes_naming(text: bytes) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if text in line.replace(b"\0", b" "):
            found.append(pid)
    return found
