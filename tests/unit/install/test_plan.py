"""The plan: choices, refusals, the build's variables, and the key of its wheel."""

import dataclasses
from pathlib import Path

import pytest

from hvdkit.errors import BuildError
from hvdkit.install.frameworks import Framework
from hvdkit.install.machine import GIB, Machine
from hvdkit.install.plan import Options, choose_jobs, make_plan
from hvdkit.install.steps import require_buildable
from hvdkit.install.toolchain import Mpi, Nccl, Tool, Toolchain

TORCH = Framework("torch", "2.13.0+cpu", Path("/site/torch"))
TORCH_CUDA = Framework("torch", "2.13.0+cu130", Path("/site/torch"), cuda="13.0")
TENSORFLOW = Framework("tensorflow", "2.21.0", Path("/site/tensorflow"), cuda="12.5.1")
BOTH = {"torch": TORCH, "tensorflow": TENSORFLOW}
MACHINE = Machine(8, 64 * GIB, "x86_64+avx", "glibc-2.36")
MPI = Mpi("/usr/bin/mpicxx", "Open MPI 4.1.4")
NCCL = Nccl(Path("/opt/nccl/include/nccl.h"), Path("/opt/nccl/lib/libnccl.so.2"), "2.27.3")
TOOLS = Toolchain(
    compiler=Tool("/usr/bin/g++", "12.2.0"),
    make=Tool("/usr/bin/make", "4.3"),
    cmake=Tool("/usr/bin/cmake", "3.25.1"),
    python_headers=Path("/usr/include/python3.11"),
    mpi=None,
    cuda_home=None,
    nvcc=None,
    nccl=None,
)
WITH_MPI = dataclasses.replace(TOOLS, mpi=MPI)
WITH_CUDA = dataclasses.replace(
    TOOLS, cuda_home=Path("/opt/cuda"), nvcc=Tool("/opt/cuda/bin/nvcc", "13.0"), nccl=NCCL
)


def plan_for(
    options=None, installed=None, machine=MACHINE, tools=TOOLS, free=10 * GIB, environ=None
):
    installed = BOTH if installed is None else installed
    return make_plan(options or Options(), installed, machine, tools, free, environ or {})


@pytest.mark.parametrize(
    ("cores", "memory_gib", "jobs"),
    [(8, 64, 8), (8, 8, 4), (2, 64, 2), (4, 1, 1), (1, 0, 1), (3, 5.9, 2)],
)
def test_jobs_from_cores_and_memory(cores, memory_gib, jobs):
    assert choose_jobs(Machine(cores, int(memory_gib * GIB), "x86_64", "glibc-2.36")) == jobs


def test_the_default_is_what_is_installed():
    plan = plan_for()
    assert [framework.name for framework in plan.frameworks] == ["torch", "tensorflow"]
    assert plan.controllers == ("gloo",)
    assert plan.jobs == 8
    assert plan.missing == ()
    assert plan.environment["HOROVOD_WITH_PYTORCH"] == "1"
    assert plan.environment["HOROVOD_WITH_TENSORFLOW"] == "1"
    assert plan.environment["HOROVOD_WITHOUT_MXNET"] == "1"
    assert plan.environment["HOROVOD_WITH_GLOO"] == "1"
    assert plan.environment["HOROVOD_WITHOUT_MPI"] == "1"
    assert plan.environment["HOROVOD_CPU_OPERATIONS"] == "GLOO"
    assert plan.environment["MAKEFLAGS"] == "-j8"
    assert "HOROVOD_GPU_OPERATIONS" not in plan.environment
    assert "CMAKE_POLICY_VERSION_MINIMUM" not in plan.environment


def test_one_framework_leaves_the_other_out():
    plan = plan_for(Options(frameworks=("torch",)))
    assert plan.environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in plan.environment
    assert "xla-gpu-only" not in {edit.name for edit in plan.edits}


def test_no_framework_is_refused():
    with pytest.raises(BuildError, match=r"No framework is installed.*pip install torch"):
        plan_for(installed={})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("mxnet",), "Unknown framework 'mxnet'.*torch, tensorflow"),
        (("tensorflow",), "tensorflow was asked for and is not installed"),
        ((), "--frameworks is empty"),
    ],
)
def test_frameworks_that_cannot_be_met(wanted, message):
    with pytest.raises(BuildError, match=message):
        plan_for(Options(frameworks=wanted), installed={"torch": TORCH})


def test_mpi_is_built_in_when_found_and_left_out_on_request():
    assert plan_for(tools=WITH_MPI).controllers == ("gloo", "mpi")
    assert plan_for(tools=WITH_MPI).environment["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_CPU_OPERATIONS" not in plan_for(tools=WITH_MPI).environment
    assert plan_for(Options(mpi=False), tools=WITH_MPI).controllers == ("gloo",)
    with pytest.raises(BuildError, match="apt-get install libopenmpi-dev"):
        plan_for(Options(mpi=True))


def test_nccl():
    plan = plan_for(Options(gpu="nccl"), installed={"torch": TORCH_CUDA}, tools=WITH_CUDA)
    assert plan.environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert plan.environment["HOROVOD_NCCL_HOME"] == "/opt/nccl"
    assert plan.environment["HOROVOD_NCCL_LINK"] == "SHARED"
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"):
        assert plan.environment[name] == "/opt/cuda"
    assert plan.missing == ()


def test_a_static_nccl_is_not_linked_as_a_shared_one():
    static = dataclasses.replace(NCCL, library=NCCL.library.with_name("libnccl_static.a"))
    tools = dataclasses.replace(WITH_CUDA, nccl=static)
    plan = plan_for(Options(gpu="nccl"), installed={"torch": TORCH_CUDA}, tools=tools)
    assert "HOROVOD_NCCL_LINK" not in plan.environment


def test_a_rocm_build_is_told_so():
    rocm = dataclasses.replace(TORCH, version="2.13.0+rocm7", rocm="7.0")
    plan = plan_for(Options(gpu="nccl"), installed={"torch": rocm}, tools=WITH_CUDA)
    assert plan.environment["HOROVOD_GPU"] == "ROCM"
    cuda = plan_for(Options(gpu="nccl"), installed={"torch": TORCH_CUDA}, tools=WITH_CUDA)
    assert "HOROVOD_GPU" not in cuda.environment


def test_nccl_for_a_cpu_build_is_refused_by_name():
    with pytest.raises(BuildError, match=r"torch 2\.13\.0\+cpu is a CPU build"):
        plan_for(Options(gpu="nccl"), tools=WITH_CUDA)


def test_nccl_without_its_tools_is_missing():
    plan = plan_for(Options(gpu="nccl"), installed={"torch": TORCH_CUDA})
    assert [text.split()[:2] for text, _ in plan.missing] == [["the", "CUDA"], ["NCCL", "headers"]]


@pytest.mark.parametrize("jobs", [0, -1])
def test_jobs_below_one_are_refused(jobs):
    with pytest.raises(BuildError, match=f"at least 1, found {jobs}"):
        plan_for(Options(jobs=jobs))


def test_jobs_are_taken_as_given():
    assert plan_for(Options(jobs=3)).environment["MAKEFLAGS"] == "-j3"


@pytest.mark.parametrize("cmake", [None, Tool("cmake", "4.1.0")])
def test_a_new_cmake_gets_the_policy(cmake):
    plan = plan_for(tools=dataclasses.replace(TOOLS, cmake=cmake))
    assert plan.environment["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"


def test_all_that_is_missing_is_one_line_that_installs_it():
    bare = dataclasses.replace(TOOLS, compiler=None, make=None, python_headers=None)
    plan = plan_for(tools=bare)
    with pytest.raises(BuildError) as caught:
        require_buildable(plan)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith("apt-get install g++ make python3-dev")


def test_a_compiler_that_the_user_named_and_that_is_missing_is_named():
    plan = plan_for(
        tools=dataclasses.replace(TOOLS, compiler=None), environ={"CXX": "/opt/gcc-14/g++"}
    )
    assert plan.missing == (("the C++ compiler that CXX names (/opt/gcc-14/g++)", "g++"),)


def test_little_disk_is_missing():
    with pytest.raises(BuildError, match=r"0\.5 GiB are free, 1\.5 are needed.*TMPDIR"):
        require_buildable(plan_for(free=GIB // 2))


KEY = plan_for().key


def test_equal_plans_have_one_key():
    assert plan_for().key == KEY
    # Neither jobs nor what the build happens to lack changes the wheel.
    assert plan_for(Options(jobs=1)).key == KEY
    assert plan_for(tools=dataclasses.replace(TOOLS, compiler=None), free=0).key == KEY


@pytest.mark.parametrize(
    "changes",
    [
        {"installed": {"torch": TORCH}},
        {"installed": {**BOTH, "torch": TORCH_CUDA}},
        {"installed": {**BOTH, "torch": dataclasses.replace(TORCH, version="2.13.1+cpu")}},
        {"installed": {**BOTH, "torch": dataclasses.replace(TORCH, cxx11_abi=False)}},
        {"installed": {**BOTH, "tensorflow": dataclasses.replace(TENSORFLOW, version="2.20.0")}},
        {"installed": {**BOTH, "tensorflow": dataclasses.replace(TENSORFLOW, cuda=None)}},
        {"machine": dataclasses.replace(MACHINE, processor="x86_64")},
        {"machine": dataclasses.replace(MACHINE, libc="glibc-2.39")},
        {"tools": WITH_MPI},
        {"environ": {"CXXFLAGS": "-O0"}},
    ],
)
def test_whatever_matters_changes_the_key(changes):
    assert plan_for(**changes).key != KEY


def test_the_version_of_mpi_and_nccl_changes_the_key():
    mpi5 = dataclasses.replace(TOOLS, mpi=Mpi("/usr/bin/mpicxx", "Open MPI 5.0.1"))
    assert plan_for(tools=mpi5).key != plan_for(tools=WITH_MPI).key
    cuda = {"options": Options(gpu="nccl"), "installed": {"torch": TORCH_CUDA}}
    newer = dataclasses.replace(WITH_CUDA, nccl=dataclasses.replace(NCCL, version="2.28.0"))
    assert plan_for(**cuda, tools=newer).key != plan_for(**cuda, tools=WITH_CUDA).key


def test_the_gpu_architectures_change_the_key_of_a_cuda_build_alone():
    chosen = {"HOROVOD_BUILD_CUDA_CC_LIST": "90"}
    cuda = {"installed": {"torch": TORCH_CUDA}, "tools": WITH_CUDA}
    assert plan_for(**cuda, environ=chosen).key != plan_for(**cuda).key
    assert plan_for(environ=chosen).key == KEY


def test_a_cuda_build_of_torch_is_told_where_cuda_is():
    plan = plan_for(installed={"torch": TORCH_CUDA}, tools=WITH_CUDA)
    assert plan.environment["CUDA_HOME"] == "/opt/cuda"
    assert "CUDA_HOME" not in plan_for(tools=WITH_CUDA).environment


def test_a_gpu_build_of_torch_gets_advice():
    (note,) = plan_for(installed={"torch": TORCH_CUDA}).notes
    assert "--gpu nccl" in note
    assert plan_for().notes == ()
