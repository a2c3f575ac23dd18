"""Asking a built Horovod library what it can do, in a process of its own.

The library links the framework's C++ libraries: loading it shows whether they still fit, and
takes a fraction of the time that importing the framework takes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.install.frameworks import Framework

__all__ = ["FEATURES", "Probe", "probe_libraries"]

FEATURES = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl")
_SCRIPT = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
names = sys.argv[2].split(",")
print(json.dumps({n: bool(getattr(library, f"horovod_{n}_built")()) for n in names}))
"""


@dataclass(frozen=True)
class Probe:
    """What one library answered: its features, or the error that it failed to load with."""

    features: Mapping[str, bool] = field(default_factory=dict)
    error: str = ""


def probe_libraries(
    libraries: Mapping[str, Path], frameworks: Mapping[str, Framework], deadline_s: float = 60.0
) -> dict[str, Probe]:
    """Load each framework's library in a process of its own, all at once.

    Args:
        libraries: Framework name to Horovod's library for it.
        frameworks: The installed frameworks; a library whose framework is absent is not loaded.
        deadline_s: How long a library may take to load.
    """
    started = {}
    for name, library in libraries.items():
        if name not in frameworks:
            continue
        path = frameworks[name].path
        folders = [str(path / "lib"), str(path), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        started[name] = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(library), ",".join(FEATURES)],
            cwd="/",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    return {name: _read_answer(process, deadline_s) for name, process in started.items()}


def _read_answer(process: subprocess.Popen[str], deadline_s: float) -> Probe:
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Probe(error=f"it did not load within {deadline_s:g} s")
    if process.returncode:
        last = errors.strip().splitlines()
        return Probe(error=last[-1] if last else f"it ended with code {process.returncode}")
    return Probe(features=json.loads(output.strip().splitlines()[-1]))
