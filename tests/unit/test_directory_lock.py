"""Two jobs never write into one directory; a job that is gone holds up nobody."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit import directory_lock
from hvdkit.checkpoint import CheckpointStore
from hvdkit.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from hvdkit.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.write(1, lambda file: file.write(b"theirs"))
print("held", flush=True)
time.sleep(60)
"""
OTHER = """
import sys
from hvdkit import directory_lock
from hvdkit.checkpoint import CheckpointStore
directory_lock.WAIT_S = 0.2
CheckpointStore(sys.argv[1]).write(9, lambda file: file.write(b"theirs"))
"""


def write(store, step=2):
    return store.write(step, lambda file: file.write(b"ours"))


def run_other(directory):
    return subprocess.run(
        [sys.executable, "-c", OTHER, str(directory)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of ``tmp_path``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_job_is_refused_and_reads_all_the_same(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(directory_lock, "WAIT_S", 0.2)
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=rf"another job .*process {holder.pid} on .*own"):
        write(store)
    assert [saved.step for saved in store.checkpoints()] == [1]
    assert store.latest().path.read_bytes() == b"theirs"


def test_a_job_that_ends_soon_is_waited_for_and_a_killed_one_leaves_no_lock(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)  # may still be there when the next one starts
    store = CheckpointStore(tmp_path)
    write(store)
    assert [saved.step for saved in store.checkpoints()] == [1, 2]


def test_stores_of_one_process_share_the_lock_until_the_last_is_closed(tmp_path):
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path / "." / "")
    for store in (first, second):
        write(store)
    refused = run_other(tmp_path)
    assert f"process {os.getpid()}" in refused.stderr
    first.close()
    assert run_other(tmp_path).returncode == 1
    second.close()
    gc.collect()
    done = run_other(tmp_path)
    assert done.returncode == 0, done.stderr
    assert CheckpointStore(tmp_path).latest().step == 9
    write(first, 10)  # locks anew
    assert run_other(tmp_path).returncode == 1


def test_a_directory_that_was_made_anew_is_locked_anew(tmp_path):
    directory = tmp_path / "runs"
    store = CheckpointStore(directory)
    write(store)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    write(store)
    assert run_other(directory).returncode == 1


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    """As the workers of a data loader, which may live a little longer than a killed job."""
    script = (
        "import os, sys, time\n"
        "from hvdkit.checkpoint import CheckpointStore\n"
        "store = CheckpointStore(sys.argv[1])\n"
        "store.write(1, lambda file: file.write(b'theirs'))\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    child = int(done.stdout.readline())
    try:
        assert done.wait(30) == -signal.SIGKILL
        write(CheckpointStore(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        done.stdout.close()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(directory_lock.fcntl, "lockf", refuse)
    started_s = time.monotonic()
    with pytest.warns(UserWarning, match="has no locks"):
        write(CheckpointStore(tmp_path))
    assert time.monotonic() - started_s < directory_lock.WAIT_S
