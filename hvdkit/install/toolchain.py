"""Which build tools are there: compiler, make, CMake, MPI, CUDA, NCCL, Python's headers."""

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.install.versions import release

__all__ = ["Mpi", "Nccl", "Tool", "Toolchain", "look_at_toolchain"]

MIN_CMAKE = (3, 13)
COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True)
class Tool:
    """A program and the version that it reports ("" if it reports none)."""

    path: str
    version: str


@dataclass(frozen=True)
class Mpi:
    """An MPI whose compiler wrapper compiles and links."""

    wrapper: str
    version: str


@dataclass(frozen=True)
class Nccl:
    """NCCL (or RCCL) that can be built against.

    Attributes:
        header: The path of nccl.h.
        library: The path of the shared or static library.
        version: For example "2.27.3".
    """

    header: Path
    library: Path
    version: str


@dataclass(frozen=True)
class Toolchain:
    """The build tools of this machine; None where one is missing or does not work."""

    compiler: Tool | None
    make: Tool | None
    cmake: Tool | None
    python_headers: Path | None
    mpi: Mpi | None
    cuda_home: Path | None
    nvcc: Tool | None
    nccl: Nccl | None


def look_at_toolchain() -> Toolchain:
    """Find the tools on PATH (and CXX, HOROVOD_CMAKE, HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME)."""
    cmake = find_tool([os.environ.get("HOROVOD_CMAKE", ""), "cmake"])
    if cmake and release(cmake.version or "0") < MIN_CMAKE:
        cmake = None
    cuda_home = _find_cuda_home()
    return Toolchain(
        # A CXX that the user set is the only candidate: falling back would surprise.
        compiler=find_tool([os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS),
        make=find_tool(["make", "gmake"]),
        cmake=cmake,
        python_headers=_find_python_headers(),
        mpi=_find_mpi(),
        cuda_home=cuda_home,
        nvcc=find_tool([f"{cuda_home}/bin/nvcc"]) if cuda_home else None,
        nccl=_find_nccl(cuda_home),
    )


def find_tool(names: Sequence[str]) -> Tool | None:
    """Return the first of some commands whose program is there; empty names are passed over."""
    for name in names:
        words = name.split()
        path = shutil.which(words[0]) if words else None
        if path:
            return Tool(path, _ask_version([path, *words[1:], "--version"]))
    return None


def _ask_version(command: Sequence[str]) -> str:
    output = _run(command)
    # nvcc says "release 13.0, V13.0.88"; the others put the version last on the first line.
    match = re.search(r"\bV(\d+\.\d+[.\d]*)", output) or re.search(
        r"\b(\d+\.\d+[.\d]*)", output.split("\n", 1)[0].split(")")[-1] or output
    )
    return match[1] if match else ""


def _run(command: Sequence[str], timeout_s: float = 30) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _find_python_headers() -> Path | None:
    folder = Path(sysconfig.get_path("include"))
    return folder if (folder / "Python.h").is_file() else None


def _find_mpi() -> Mpi | None:
    """Return the MPI whose C++ wrapper shows its compile and link flags, with its version."""
    wrapper = shutil.which("mpicxx") or shutil.which("mpic++")
    if wrapper is None:
        return None
    # Open MPI: --showme; MPICH and Intel MPI: -show. Either proves that a compiler is behind it.
    if not _run([wrapper, "--showme"]) and not _run([wrapper, "-show"]):
        return None
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    output = _run([mpirun, "--version"]) if mpirun else ""
    if not output:
        return None
    first = next((line.strip() for line in output.splitlines() if re.search(r"\d", line)), "")
    number = re.search(r"\d+\.\d+[.\d]*", output)
    name = "Open MPI" if "Open MPI" in output or "OpenRTE" in output else first.split(" Version")[0]
    return Mpi(wrapper, f"{name} {number[0]}" if number else first)


def _find_cuda_home() -> Path | None:
    """Return the CUDA toolkit that has both a compiler and headers.

    An nvcc on PATH may be a wrapper script that lies outside of its toolkit.
    """
    nvcc = shutil.which("nvcc")
    named = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME")]
    homes = [Path(home) for home in named if home]
    homes += [Path(nvcc).resolve().parents[1]] if nvcc else []
    for home in (*homes, Path("/usr/local/cuda")):
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            return home
    return None


def _find_nccl(cuda_home: Path | None) -> Nccl | None:
    """Look in HOROVOD_NCCL_HOME, the wheels that CUDA builds of torch bring, and the system."""
    homes = [Path(home) for home in (os.environ.get("HOROVOD_NCCL_HOME"),) if home]
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations if nvidia else None) or []:
        homes.append(Path(folder) / "nccl")
    homes += [*([cuda_home] if cuda_home else []), Path("/usr/local"), Path("/usr")]
    for home in homes:
        header = home / "include/nccl.h"
        library = _find_nccl_library(home)
        if header.is_file() and library:
            return Nccl(header, library, _read_nccl_version(header))
    return None


def _find_nccl_library(home: Path) -> Path | None:
    for folder in (home / "lib", home / "lib64", *sorted((home / "lib").glob("*-linux-gnu"))):
        for name in ("libnccl_static.a", "libnccl.so", "libnccl.so.2"):
            if (folder / name).is_file():
                return folder / name
    return None


def _read_nccl_version(header: Path) -> str:
    text = header.read_text(encoding="utf-8", errors="replace")
    parts = [
        match[1]
        for name in ("MAJOR", "MINOR", "PATCH")
        if (match := re.search(rf"#define\s+NCCL_{name}\s+(\d+)", text))
    ]
    return ".".join(parts)
