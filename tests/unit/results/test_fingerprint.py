"""The fingerprint describes the machine that the tests run on."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata

from hvdkit.results.fingerprint import read_fingerprint


def test_it_names_this_machine_and_survives_json():
    fingerprint = json.loads(json.dumps(read_fingerprint()))
    assert fingerprint["cores"] == len(os.sched_getaffinity(0))
    assert fingerprint["python"] == platform.python_version()
    assert platform.machine() in fingerprint["system"]
    assert fingerprint["processor"]
    assert fingerprint["load"] >= 0
    with open("/proc/meminfo", encoding="ascii") as lines:
        total_kib = int(next(line for line in lines if line.startswith("MemTotal")).split()[1])
    assert fingerprint["memory_bytes"] == total_kib * 1024


def test_versions_are_those_installed():
    versions = read_fingerprint()["versions"]
    assert isinstance(versions, dict)
    for name, version in versions.items():
        assert metadata.version(name) == version
    installed = {one.metadata["Name"].lower() for one in metadata.distributions()}
    assert set(versions) == installed & {
        "hvdkit", "horovod", "torch", "tensorflow", "keras", "numpy",
    }  # fmt: skip


def test_reading_it_loads_no_framework():
    code = (
        "import sys; from hvdkit.results.fingerprint import read_fingerprint; read_fingerprint();"
        "print({'torch', 'tensorflow', 'keras', 'horovod'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
