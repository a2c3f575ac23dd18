"""SIGKILL at twenty moments of training: the job ends, the next one goes on where it was."""

import re
import warnings
from pathlib import Path

import pytest

from hvdkit.checkpoint import CheckpointStore
from tests.distributed.launch import launch
from tests.system.command import find_processes_naming

WORKER = Path(__file__).with_name("worker_kills.py")
MOMENTS = 10


@pytest.mark.parametrize("np", [2, 3])
def test_killed_jobs_end_and_their_checkpoints_load(np, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    newest = 0
    for moment in range(MOMENTS):
        done = launch(WORKER, np, [str(store.directory), str(moment + MOMENTS * np)], timeout_s=50)
        assert done.exit_code not in (0, None), done.explain("the job should have ended by itself")
        [victim] = re.findall(r"rank (\d) dies", done.output)
        starts = re.findall(r"rank \d starts at (\d+)", done.output)
        assert starts == [str(newest)] * np, done.explain(f"checkpoint {newest} was not loaded")
        missing = done.output.count(f"Horovod has been shut down: rank {victim} does not answer")
        assert missing >= np - 1, done.explain(f"rank {victim} should be named")
        assert not find_processes_naming("worker_kills.py"), "a process of the job is left"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saved = store.latest()
        assert saved is not None
        assert saved.step > newest
        newest = saved.step
