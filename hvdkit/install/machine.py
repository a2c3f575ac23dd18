"""Cores, memory, disk and processor flags: what decides how many compilers may run."""

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GIB", "Machine", "free_disk_bytes", "look_at_machine"]

GIB = 1 << 30
# Instruction sets that Horovod's build turns on when the building machine has them.
BUILD_FLAGS = ("avx", "f16c", "fma")


@dataclass(frozen=True)
class Machine:
    """The resources of the machine that builds.

    Attributes:
        cores: Cores that this process may use, a container's quota included.
        memory_bytes: Memory that is free for use, a container's limit included.
        processor: Machine name and the instruction sets that matter, for example
            "x86_64+avx+f16c+fma"; code built with them does not run without them.
        libc: For example "glibc-2.36".
    """

    cores: int
    memory_bytes: int
    processor: str
    libc: str


def look_at_machine() -> Machine:
    """Read the resources of this machine, or of the container that limits this process."""
    return Machine(_count_cores(), _measure_memory(), _name_processor(), "-".join(_libc()))


def free_disk_bytes(path: Path) -> int:
    """Return the free space at a path, or at the nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _count_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _first_line("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores or 1, max(1, int(quota[0]) // int(quota[1])))
    return cores or 1


def _measure_memory() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 2 * GIB
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _first_line(f"{folder}/{limit_name}")
            used = _first_line(f"{folder}/{used_name}")
            if limit.isdigit() and used.isdigit():
                available = min(available, max(0, int(limit) - int(used)))
    return available


def _name_processor() -> str:
    match = re.search(r"^flags\s*:(.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return "+".join([platform.machine(), *(flag for flag in BUILD_FLAGS if flag in flags)])


def _libc() -> tuple[str, str]:
    name, version = platform.libc_ver()
    return name or "libc", version or "unknown"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first_line(path: str) -> str:
    return _text(path).split("\n", 1)[0].strip()
