"""The plan: everything that decides what is built, fixed before anything is done."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdkit.errors import BuildError
from hvdkit.install.compatibility import EDITS
from hvdkit.install.edits import Edit, Target, digest, select_edits
from hvdkit.install.frameworks import DISTRIBUTIONS, Framework
from hvdkit.install.machine import GIB, Machine
from hvdkit.install.sdist import HOROVOD_VERSION, SDIST_SHA256
from hvdkit.install.toolchain import Mpi, Nccl, Toolchain
from hvdkit.install.versions import release

__all__ = ["Options", "Plan", "choose_jobs", "make_plan"]

MEMORY_PER_JOB_BYTES = 2 * GIB
DISK_BYTES = GIB + GIB // 2


@dataclass(frozen=True)
class Options:
    """What the user asked for; None leaves the choice to the plan.

    Attributes:
        frameworks: Names to build for; default those installed.
        mpi: Build the MPI controller; default when a working MPI is there.
        gpu: "nccl" to reduce tensors on GPUs through NCCL (or RCCL).
        jobs: Compilers that run at once.
    """

    frameworks: tuple[str, ...] | None = None
    mpi: bool | None = None
    gpu: str | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Plan:
    """What will be built, and how.

    Attributes:
        frameworks: The frameworks to build for.
        mpi: The MPI to build with, or None.
        gpu: "nccl" or None.
        nccl: The NCCL to build with, or None.
        jobs: Compilers that run at once.
        edits: The compatibility edits that apply.
        environment: Variables of the build.
        missing: What the build needs and this machine lacks, as (what, how to get it).
        material: Everything the wheel depends on; the cache key is a digest of it.
        toolchain: The build tools.
        notes: Advice that changes nothing.
    """

    frameworks: tuple[Framework, ...]
    mpi: Mpi | None
    gpu: str | None
    nccl: Nccl | None
    jobs: int
    edits: tuple[Edit, ...]
    environment: Mapping[str, str]
    missing: tuple[tuple[str, str], ...]
    material: Mapping[str, object]
    toolchain: Toolchain
    notes: tuple[str, ...] = field(default=())

    @property
    def key(self) -> str:
        """The cache key: equal plans, and only those, share a wheel."""
        text = json.dumps(self.material, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers that the build offers."""
        return ("gloo", "mpi") if self.mpi else ("gloo",)


def make_plan(
    options: Options,
    installed: Mapping[str, Framework],
    machine: Machine,
    toolchain: Toolchain,
    free_bytes: int,
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """Decide what to build from what was asked for and what is there.

    Raises:
        BuildError: The request cannot be met whatever is installed beside it: no framework, an
            unknown one, a GPU build for a CPU framework, bad job count. What only the build
            itself lacks goes to ``Plan.missing``, because a cached wheel needs no compiler.
    """
    environ = os.environ if environ is None else environ
    frameworks = _choose_frameworks(options.frameworks, installed)
    if options.gpu not in (None, "nccl"):
        raise BuildError(f"Unknown GPU library {options.gpu!r}; hvdkit knows: nccl.")
    if options.mpi and toolchain.mpi is None:
        raise BuildError(
            "--with-mpi needs an MPI with a C++ compiler wrapper and mpirun, and none works "
            "here. Install one, for example: apt-get install libopenmpi-dev openmpi-bin"
        )
    mpi = None if options.mpi is False else toolchain.mpi
    nccl = toolchain.nccl if options.gpu == "nccl" else None
    if options.gpu:
        _require_gpu_builds(frameworks)
    jobs = choose_jobs(machine) if options.jobs is None else options.jobs
    if jobs < 1:
        raise BuildError(f"--jobs must be at least 1, found {jobs}.")
    edits = select_edits(EDITS, Target({f.name: f.version for f in frameworks}))
    return Plan(
        frameworks=frameworks,
        mpi=mpi,
        gpu=options.gpu,
        nccl=nccl,
        jobs=jobs,
        edits=edits,
        environment=_build_environment(frameworks, mpi, options.gpu, nccl, jobs, toolchain),
        missing=tuple(_find_missing(toolchain, options.gpu, free_bytes, environ)),
        material=_collect_material(
            frameworks, mpi, options.gpu, nccl, edits, machine, toolchain, environ
        ),
        toolchain=toolchain,
        notes=tuple(_advise(options, frameworks, toolchain)),
    )


def choose_jobs(machine: Machine) -> int:
    """Return how many compilers to run: one a core, 2 GiB of free memory each, at least one."""
    return max(1, min(machine.cores, machine.memory_bytes // MEMORY_PER_JOB_BYTES))


def _choose_frameworks(
    wanted: tuple[str, ...] | None, installed: Mapping[str, Framework]
) -> tuple[Framework, ...]:
    known = ", ".join(DISTRIBUTIONS)
    if wanted is None:
        if not installed:
            raise BuildError(
                f"No framework is installed in this environment (looked for {known}). "
                "Install one first, for example: pip install torch"
            )
        return tuple(installed.values())
    if not wanted:
        raise BuildError(f"--frameworks is empty; give one or more of: {known}.")
    for name in wanted:
        if name not in DISTRIBUTIONS:
            raise BuildError(f"Unknown framework {name!r}; hvdkit knows: {known}.")
        if name not in installed:
            raise BuildError(
                f"{name} was asked for and is not installed in this environment. "
                f"Install it first, for example: pip install {name}"
            )
    return tuple(installed[name] for name in dict.fromkeys(wanted))


def _require_gpu_builds(frameworks: tuple[Framework, ...]) -> None:
    for framework in frameworks:
        if not framework.cuda and not framework.rocm:
            raise BuildError(
                f"--gpu needs GPU builds, and {framework.name} {framework.version} is a CPU "
                "build. Install a CUDA or ROCm build of it, or leave it out with --frameworks."
            )


def _find_missing(
    toolchain: Toolchain, gpu: str | None, free_bytes: int, environ: Mapping[str, str]
):
    if toolchain.compiler is None:
        cxx = environ.get("CXX")
        yield (f"the C++ compiler that CXX names ({cxx})" if cxx else "a C++ compiler", "g++")
    if toolchain.make is None:
        yield "make", "make"
    if toolchain.python_headers is None:
        yield "Python.h, Python's headers", "python3-dev"
    if gpu and toolchain.nvcc is None:
        yield "the CUDA toolkit with nvcc (or set HOROVOD_CUDA_HOME)", "nvidia-cuda-toolkit"
    if gpu and toolchain.nccl is None:
        yield "NCCL headers and library (or set HOROVOD_NCCL_HOME)", "libnccl-dev"
    if free_bytes < DISK_BYTES:
        yield (
            f"disk space: {free_bytes / GIB:.1f} GiB are free, {DISK_BYTES / GIB:.1f} are needed "
            "(TMPDIR chooses where the build runs, HVDKIT_CACHE_DIR where wheels are kept)",
            "",
        )


def _build_environment(
    frameworks: tuple[Framework, ...],
    mpi: Mpi | None,
    gpu: str | None,
    nccl: Nccl | None,
    jobs: int,
    toolchain: Toolchain,
) -> dict[str, str]:
    names = {framework.name for framework in frameworks}
    environment = {
        # WITH makes a framework that fails to build an error; without it Horovod drops it.
        "HOROVOD_WITH_PYTORCH" if "torch" in names else "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW" if "tensorflow" in names else "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_GENERATOR": "Unix Makefiles",
    }
    if mpi is None:
        environment["HOROVOD_CPU_OPERATIONS"] = "GLOO"
    if toolchain.cmake is None or release(toolchain.cmake.version or "0") >= (4,):
        # CMake 4 refuses the policy version of the bundled Gloo.
        environment["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    if gpu:
        environment["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        if any(framework.rocm for framework in frameworks):
            environment["HOROVOD_GPU"] = "ROCM"
    if toolchain.cuda_home and (gpu or _compiles_cuda(frameworks)):
        # Horovod, torch and CMake each look for the toolkit by a variable of their own.
        for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDAToolkit_ROOT"):
            environment[name] = str(toolchain.cuda_home)
    if nccl:
        environment["HOROVOD_NCCL_HOME"] = str(nccl.header.parent.parent)
        if nccl.library.suffix != ".a":
            environment["HOROVOD_NCCL_LINK"] = "SHARED"
    return environment


def _collect_material(
    frameworks: tuple[Framework, ...],
    mpi: Mpi | None,
    gpu: str | None,
    nccl: Nccl | None,
    edits: tuple[Edit, ...],
    machine: Machine,
    toolchain: Toolchain,
    environ: Mapping[str, str],
) -> dict[str, object]:
    material: dict[str, object] = {
        "horovod": HOROVOD_VERSION,
        "sdist": SDIST_SHA256,
        "edits": digest(edits),
        "python": sysconfig.get_config_var("SOABI"),
        "processor": machine.processor,
        "libc": machine.libc,
        "mpi": mpi.version if mpi else None,
        "gpu": gpu,
        "cxxflags": environ.get("CXXFLAGS", ""),
    }
    for framework in frameworks:
        gpu_build = framework.cuda or framework.rocm or "cpu"
        material[framework.name] = [framework.version, gpu_build, framework.cxx11_abi]
    if gpu or _compiles_cuda(frameworks):
        material["nvcc"] = toolchain.nvcc.version if toolchain.nvcc else None
        material["nccl"] = nccl.version if nccl else None
        material["cuda_cc_list"] = environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "")
    return material


def _compiles_cuda(frameworks: tuple[Framework, ...]) -> bool:
    # A CUDA build of torch makes Horovod compile its CUDA kernels even without --gpu.
    return any(framework.cuda and framework.name == "torch" for framework in frameworks)


def _advise(options: Options, frameworks: tuple[Framework, ...], toolchain: Toolchain):
    gpu_builds = [f.name for f in frameworks if f.name == "torch" and (f.cuda or f.rocm)]
    if gpu_builds and options.gpu is None:
        found = "NCCL was found" if toolchain.nccl else "it needs NCCL"
        yield f"torch is a GPU build: `--gpu nccl` reduces tensors on the GPUs ({found})."
    if options.mpi is None and toolchain.mpi:
        yield f"{toolchain.mpi.version} was found and is built in; --without-mpi leaves it out."
