"""What a container's limits leave of the machine."""

import pytest

from hvdkit.install import machine

GIB_IN_KB = 1 << 20


@pytest.fixture
def files(monkeypatch):
    """Files of the kernel, by path; a 16-core machine with 8 GiB available."""
    texts = {"/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB_IN_KB} kB\n"}
    monkeypatch.setattr(machine, "_text", lambda path: texts.get(path, ""))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    return texts


def test_without_limits(files):
    found = machine.look_at_machine()
    assert (found.cores, found.memory_bytes) == (16, 8 * machine.GIB)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 16), ("400000 100000", 4), ("50000 100000", 1), ("9900000 100000", 16)],
)
def test_the_quota_of_cores(files, quota, cores):
    files["/sys/fs/cgroup/cpu.max"] = f"{quota}\n"
    assert machine.look_at_machine().cores == cores


@pytest.mark.parametrize(
    ("folder", "limit", "used"),
    [
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_limit_of_memory(files, folder, limit, used):
    files[f"{folder}/{limit}"] = f"{4 * machine.GIB}\n"
    files[f"{folder}/{used}"] = f"{machine.GIB}\n"
    assert machine.look_at_machine().memory_bytes == 3 * machine.GIB
    files[f"{folder}/{limit}"] = "max\n"
    assert machine.look_at_machine().memory_bytes == 8 * machine.GIB


def test_the_processor_names_what_code_is_built_for(files):
    files["/proc/cpuinfo"] = "processor : 0\nflags\t\t: fpu fma sse2 avx\n"
    assert machine.look_at_machine().processor.split("+")[1:] == ["avx", "fma"]
