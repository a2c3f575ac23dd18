"""Ending a process group: grandchildren too, and those that ignore SIGTERM."""

import subprocess
import sys

import pytest

from hvdkit.install.process import end_process_group

SCRIPT = """
import signal, subprocess, sys, time
if {ignore}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ignore", [False, True])
def test_the_whole_group_ends(ignore):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(ignore=ignore)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    grandchild = int(process.stdout.readline())
    assert is_running(grandchild)
    end_process_group(process, grace_s=1.0)
    assert process.poll() is not None
    assert not is_running(grandchild)


def test_a_group_that_is_gone_is_fine():
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    end_process_group(process)
    assert process.returncode == 0
