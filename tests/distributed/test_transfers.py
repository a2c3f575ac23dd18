"""All-reduces through the peers' memory, and through sockets where that is not to be had."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import check_names, launch

WORKER = Path(__file__).with_name("worker_transfers.py")
SAID = "Large tensors are reduced through "
WAYS = [("memory", 2), ("memory", 3), ("sockets", 2), ("forbidden", 2)]


# A process that lets others read its memory, and a child that does.
PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)
number = ctypes.create_string_buffer(b"here")
class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
pid = os.getpid()
if os.fork() == 0:
    found = ctypes.create_string_buffer(4)
    local, remote = (IoVec(ctypes.addressof(one), 4) for one in (found, number))
    number.value = b"gone"
    libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    os._exit(found.raw != b"here")
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@functools.cache
def may_read_others() -> bool:
    """Whether this machine, or container, lets processes of one user read each other's memory."""
    return subprocess.run([sys.executable, "-c", PROBE], check=False).returncode == 0


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def way(request):
    name, size = request.param
    if name == "forbidden" and not Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        pytest.skip("this kernel has no seccomp to forbid anything by")
    done = launch(WORKER, args=[name], np=size, env={"HOROVOD_LOG_LEVEL": "info"})
    return name, done


@pytest.mark.parametrize("check", check_names(WORKER))
def test_check(way, check):
    way[1].require(check)


def test_the_way_is_the_expected_one(way):
    name, done = way
    taken, other = "the peers' memory", "sockets"
    if name != "memory" or not may_read_others():
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
