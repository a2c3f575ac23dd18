"""The machine and the versions that a measurement was taken on."""

import os
import platform
from importlib import metadata
from pathlib import Path

__all__ = ["read_fingerprint"]

DISTRIBUTIONS = ("hvdkit", "horovod", "torch", "tensorflow", "keras", "numpy")


def read_fingerprint() -> dict[str, object]:
    """Describe this machine without importing a framework.

    Returns:
        ``processor``, ``cores`` (those this process may use), ``load`` (mean number of busy
        processes in the last minute), ``memory_bytes``, ``system``, ``python`` and ``versions``
        (installed distributions only).
    """
    return {
        "processor": _read_processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _read_versions(),
    }


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _read_versions() -> dict[str, str]:
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
