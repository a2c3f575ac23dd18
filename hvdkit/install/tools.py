"""Python packages that the build needs and Horovod does not declare, kept out of the environment.

What is missing is installed into a folder of the cache that only the build sees (PYTHONPATH).
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.install.toolchain import Toolchain
from hvdkit.install.versions import release

__all__ = [
    "cmake_program",
    "find_missing_packages",
    "find_missing_runtime",
    "install_packages",
    "join_python_path",
    "run_pip",
]

# setuptools builds wheels by itself from 70.1; older ones would need the wheel package.
BUILD_REQUIREMENTS = {"setuptools": (70, 1), "packaging": ()}
# What Horovod imports at run time; its wheel is installed without dependencies, because pip
# could replace a framework.
RUNTIME_REQUIREMENTS = ("cloudpickle", "packaging", "psutil", "pyyaml", "cffi", "numpy")


def find_missing_packages(toolchain: Toolchain) -> list[str]:
    """Return the requirements of the build that this environment does not satisfy."""
    missing = []
    for name, at_least in BUILD_REQUIREMENTS.items():
        try:
            satisfied = release(metadata.version(name)) >= at_least
        except metadata.PackageNotFoundError:
            satisfied = False
        if not satisfied:
            missing.append(f"{name}>={'.'.join(map(str, at_least))}" if at_least else name)
    if toolchain.cmake is None:
        missing.append("cmake>=3.18")
    return missing


def find_missing_runtime() -> list[str]:
    """Return the run-time requirements of Horovod that are not installed."""
    missing = []
    for name in RUNTIME_REQUIREMENTS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def install_packages(requirements: list[str], folder: Path) -> None:
    """Install requirements into a private folder, dependencies included.

    Raises:
        BuildError: pip failed.
    """
    run_pip(
        ["install", "--quiet", "--upgrade", "--target", str(folder), *requirements],
        f"install the build tools {', '.join(requirements)}",
    )


def run_pip(arguments: list[str], purpose: str) -> None:
    """Run pip of this environment.

    Raises:
        BuildError: It failed; carries its last lines.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise BuildError(
            f"This environment has no pip, which is needed to {purpose}. "
            f"Install it: {sys.executable} -m ensurepip"
        )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    raise BuildError(f"pip could not {purpose}: {' '.join(lines[-3:]) or 'it gave no reason'}")


def join_python_path(folder: Path) -> str:
    """Return PYTHONPATH with a folder in front of what is there."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def cmake_program(folder: Path) -> Path | None:
    """Return the cmake that :func:`install_packages` put into a folder, if it did."""
    program = folder / "cmake/data/bin/cmake"
    return program if program.is_file() else None
