"""A rank that is lost: the others end soon, name it and what they waited for, and nothing stays."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.launch import WorkerRun, launch
from tests.system.command import find_processes_naming

WORKER = Path(__file__).with_name("worker_losses.py")
LIMITS = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3", "HOROVOD_GLOO_TIMEOUT_SECONDS": "4"}
MISSING = "does not answer: ended before the others, died, stopped, or cut off"

CASES = [
    ("torch", "die", "1", 2),
    ("torch", "die", "0", 3),
    ("torch", "die", "1,2", 3),
    ("torch", "die_in_collective", "2", 3),
    ("torch", "leave", "1", 3),
    ("torch", "fail", "0", 2),
    ("torch", "sleep", "2", 3),
    ("torch", "sleep", "0", 2),
    ("torch", "stop", "1", 3),
    ("tensorflow", "die", "1", 2),
    ("tensorflow", "sleep", "1", 2),
    ("keras", "leave", "0", 2),
    ("keras", "stop", "1", 2),
]


def run(framework: str, fault: str, victims: str, np: int) -> WorkerRun:
    return launch(WORKER, np, [framework, fault, victims], env=LIMITS, timeout_s=50)


@pytest.mark.parametrize(("framework", "fault", "victims", "np"), CASES)
def test_the_others_name_who_is_missing(framework, fault, victims, np):
    done = run(framework, fault, victims, np)
    assert done.exit_code not in (0, None), done.explain("the job should have ended by itself")
    lost = [int(rank) for rank in victims.split(",")]
    for rank in set(range(np)) - set(lost):
        told = re.search(rf"rank {rank} was told after [\d.]+ s: (.*)", done.output)
        assert told, done.explain(f"rank {rank} was not told")
        if fault == "sleep":
            assert f"rank {lost[0]} has not started " in told[1], told[1]
        elif len(lost) > 1:
            assert "ranks 1, 2 do not answer" in told[1], told[1]
        else:
            assert f"rank {lost[0]} {MISSING}" in told[1], told[1]
        waited = "hvdkit.optimizer" if framework == "torch" else "hvdkit"
        assert re.search(rf"(waiting for|not started) .*{waited}", told[1]), told[1]
    assert not find_processes_naming("worker_losses.py"), "a process of the job is left"


def test_a_job_beside_one_that_is_lost_goes_on():
    """Two jobs on one machine: they share neither ports nor files."""
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(run, "torch", "die", "1", 2)
        whole = pool.submit(run, "torch", "none", "0", 2)
    assert lost.result().exit_code not in (0, None), lost.result().explain("should have failed")
    assert whole.result().exit_code == 0, whole.result().explain("the other job failed too")
