"""Which tools are found: real programs on a PATH made for the test."""

import os
import stat

import pytest

from hvdkit.install.machine import free_disk_bytes, look_at_machine
from hvdkit.install.toolchain import find_tool, look_at_toolchain


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """Give an empty folder that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "HOROVOD_CMAKE", "HOROVOD_CUDA_HOME", "CUDA_HOME", "HOROVOD_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def add_program(folder, name, output, code=0):
    path = folder / name
    path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{output}\nEND\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_an_empty_path_has_no_tools(bin_folder):
    tools = look_at_toolchain()
    assert (tools.compiler, tools.make, tools.cmake, tools.mpi) == (None, None, None, None)


@pytest.mark.parametrize(
    ("name", "output", "version"),
    [
        ("g++", "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022", "12.2.0"),
        ("make", "GNU Make 4.3\nBuilt for x86_64-pc-linux-gnu", "4.3"),
        ("cmake", "cmake version 3.25.1\n\nCMake suite", "3.25.1"),
        ("clang++", "Debian clang version 16.0.6 (15~deb12u1)\nTarget: x86_64", "16.0.6"),
        (
            "nvcc",
            "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88",
            "13.0.88",
        ),
    ],
)
def test_versions(bin_folder, name, output, version):
    path = add_program(bin_folder, name, output)
    tool = find_tool([name])
    assert (tool.path, tool.version) == (str(path), version)


def test_a_program_that_tells_no_version_is_still_there(bin_folder):
    add_program(bin_folder, "make", "usage: make", code=1)
    assert find_tool(["make"]).version == ""


def test_cxx_is_the_only_candidate(bin_folder, monkeypatch):
    add_program(bin_folder, "g++", "g++ 12.2.0")
    monkeypatch.setenv("CXX", "nonesuch")
    assert look_at_toolchain().compiler is None
    add_program(bin_folder, "ccache", "g++ 13.3.0")
    monkeypatch.setenv("CXX", "ccache g++")
    assert look_at_toolchain().compiler.version == "13.3.0"


def test_an_old_cmake_is_none(bin_folder):
    add_program(bin_folder, "cmake", "cmake version 3.10.2")
    assert look_at_toolchain().cmake is None


def test_mpi_needs_a_wrapper_that_works_and_mpirun(bin_folder):
    add_program(bin_folder, "mpicxx", "", code=1)
    assert look_at_toolchain().mpi is None
    add_program(bin_folder, "mpicxx", "g++ -I/usr/lib/openmpi/include -lmpi")
    assert look_at_toolchain().mpi is None
    add_program(bin_folder, "mpirun", "mpirun (Open MPI) 4.1.4\n\nReport bugs to")
    assert look_at_toolchain().mpi.version == "Open MPI 4.1.4"


def test_mpich(bin_folder):
    add_program(bin_folder, "mpicxx", "g++ -lmpicxx -lmpi")
    add_program(bin_folder, "mpirun", "HYDRA build details:\n    Version:   4.0.2\n")
    assert "4.0.2" in look_at_toolchain().mpi.version


def test_a_cuda_toolkit_is_a_compiler_with_its_headers(bin_folder, tmp_path, monkeypatch):
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    nvcc = add_program(home / "bin", "nvcc", "Cuda compilation tools, release 12.8, V12.8.93")
    (bin_folder / "nvcc").symlink_to(nvcc)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path / "empty"))
    assert look_at_toolchain().cuda_home != home
    (home / "include/cuda_runtime.h").touch()
    tools = look_at_toolchain()
    assert tools.cuda_home == home
    assert (tools.nvcc.path, tools.nvcc.version) == (str(nvcc), "12.8.93")


@pytest.mark.parametrize("library", ["libnccl_static.a", "libnccl.so", "libnccl.so.2"])
def test_nccl_home(bin_folder, tmp_path, monkeypatch, library):
    home = tmp_path / "nccl"
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "include/nccl.h").write_text(
        "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n"
    )
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(home))
    (home / "lib" / library).touch()
    nccl = look_at_toolchain().nccl
    assert (nccl.library, nccl.version) == (home / "lib" / library, "2.27.3")


def test_this_machine():
    machine = look_at_machine()
    assert 1 <= machine.cores <= os.cpu_count()
    assert machine.memory_bytes > 0
    assert machine.processor.split("+")[0] == os.uname().machine
    assert machine.libc.count("-") == 1


def test_free_disk_of_a_folder_that_is_not_there_yet(tmp_path):
    assert free_disk_bytes(tmp_path / "a/b/c") == pytest.approx(free_disk_bytes(tmp_path), rel=0.1)
