"""Tests that start workers need Horovod, some a browser or sshd; else they skip, or are refused."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
NEEDS_HOROVOD = {
    "distributed",
    "examples",
    "test_bench.py",
    "test_document_blocks.py",
    "test_documents.py",
    "test_elastic_tensorflow.py",
    "test_elastic_torch.py",
    "test_exec.py",
    "test_profile.py",
}
LIBRARIES = {"torch": "mpi_lib_v2*.so", "tensorflow": "mpi_lib*.so"}


def _missing(framework: str) -> str | None:
    """Say what keeps ``horovodrun`` from running such workers; None when nothing does.

    Looks at files only: the test process itself loads neither Horovod nor a framework.
    """
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return "horovod is not installed (run: hvdkit install)"
    folder = Path(next(iter(spec.submodule_search_locations)), framework)
    if not list(folder.glob(LIBRARIES[framework])):
        return f"horovod is built without {framework} (run: hvdkit install)"
    return None


def _missing_for_browser() -> str | None:
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install chromium chromium-driver)"
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed (run: pip install selenium)"
    return None


def _missing_for_elastic() -> str | None:
    folders = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    for program in ("sshd", "ssh", "ssh-keygen"):
        if shutil.which(program, path=folders) is None:
            return f"{program} is not installed (Debian: apt-get install openssh-server)"
    return None


def _missing_for_hosts() -> str | None:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for program, package in {
        **{"ip": "iproute2", "ss": "iproute2", "iptables": "iptables"},
        **{"unshare": "util-linux", "nsenter": "util-linux"},
    }.items():
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install {package})"
    return _missing_for_elastic() or _missing("torch")


def _missing_for_slurm() -> str | None:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    folders = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    for program, package in {
        **{"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"},
        **{"munged": "munge", "ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"},
    }.items():
        if shutil.which(program, path=folders) is None:
            return f"{program} is not installed (Debian: apt-get install {package})"
    return _missing("torch")


def _missing_for_docker() -> str | None:
    if os.geteuid() != 0:
        return "only root can start a Docker engine"
    folders = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    for program, package in {
        **{"dockerd": "docker.io", "docker": "docker.io", "docker-compose": "docker-compose"},
        **{"debootstrap": "debootstrap", "git": "git"},
    }.items():
        if shutil.which(program, path=folders) is None:
            return f"{program} is not installed (Debian: apt-get install {package})"
    return None


# What a fixture needs beside Horovod, and the word that demands its tests.
FIXTURES = {
    "engine": ("docker", "of the image", _missing_for_docker),
    "browser": ("browser", "in a browser", _missing_for_browser),
    "loopback": ("elastic", "of elastic jobs", _missing_for_elastic),
    "namespaces": ("multihost", "of several hosts", _missing_for_hosts),
    "slurm": ("slurm", "under Slurm", _missing_for_slurm),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what something is missing for, or refuse where ``HVDKIT_REQUIRE`` has its word.

    The words: distributed, for Horovod; browser, elastic, multihost, slurm and docker, for tests
    with the fixtures that need a browser, an OpenSSH server, network namespaces, Slurm, or a Docker
    engine.
    """
    words = os.environ.get("HVDKIT_REQUIRE", "").split(",")
    required = "distributed" in words
    for item in items:
        for fixture, (word, tests, find_missing) in FIXTURES.items():
            if fixture not in getattr(item, "fixturenames", ()):
                continue
            missing = find_missing()
            if missing and word in words:
                raise pytest.UsageError(f"HVDKIT_REQUIRE demands the tests {tests}: {missing}")
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
        if not NEEDS_HOROVOD & set(item.path.relative_to(ROOT).parts):
            continue
        missing = _missing("tensorflow" if "tensorflow" in item.nodeid else "torch")
        if "legacy_keras" in item.nodeid and importlib.util.find_spec("tf_keras") is None:
            missing = missing or "tf_keras is not installed (run: pip install --no-deps tf_keras)"
        if missing and required:
            raise pytest.UsageError(f"HVDKIT_REQUIRE demands the distributed tests, but {missing}")
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
