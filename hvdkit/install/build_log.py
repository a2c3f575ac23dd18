"""Reading the output of a build: how far it is, the first real error, and what to do about it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Failure", "Progress", "find_failure", "read_progress"]

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\] (.*)")
_LINKED = re.compile(r"^Linking CXX \w+ library (?:.*/)?([^./]+)")
_TARGET = re.compile(r"(?:CMakeFiles/)?([\w.+-]+)\.dir/(?:.*/)?([\w.+-]+?)\.o\b")

# In order of how near to the cause they are: a compiler's own words first, the build's last.
_ERRORS = (
    re.compile(r"^\S.*?:\d+(?::\d+)?:\s+(?:fatal )?error:\s.+"),
    re.compile(r"^\S+\(\d+\): (?:fatal )?error\b.+"),
    re.compile(r"\b(?:c\+\+|cc1plus|g\+\+|clang\S*|nvcc)\S*: (?:fatal )?error\b.*"),
    re.compile(r".*(?:undefined reference to|cannot find -l|ld: ).*"),
    re.compile(r".*(?:Killed signal terminated program|No space left on device).*"),
    re.compile(r"^\s*CMake Error\b.*"),
    re.compile(r"^\s*(?:ModuleNotFoundError|ImportError|RuntimeError|OSError|error)\b: .+"),
    re.compile(r"^(?:g?make)(?:\[\d+\])?: \*\*\* .*"),
)

_HINTS = (
    (r"Killed signal terminated|out of memory|virtual memory exhausted",
     "The compiler ran out of memory: use fewer jobs, for example --jobs 1."),
    (r"No space left on device",
     "The disk is full: free some, or set TMPDIR to a folder on a larger disk."),
    (r"Python\.h: No such file", "Install Python's headers: apt-get install python3-dev"),
    (r"mpi\.h: No such file|Could NOT find MPI",
     "Install MPI's headers (apt-get install libopenmpi-dev), or use --without-mpi."),
    (r"nccl\.h: No such file|Could NOT find NCCL",
     "Install NCCL's headers, or set HOROVOD_NCCL_HOME to where NCCL is."),
    (r"cuda_runtime\.h: No such file|CUDAToolkit",
     "Install the CUDA toolkit of the framework's CUDA version, or set HOROVOD_CUDA_HOME."),
    (r"Compatibility with CMake < 3\.5",
     "CMake is too new for a bundled part: set CMAKE_POLICY_VERSION_MINIMUM=3.5."),
    (r"C\+\+17|requires? GCC|-std=",
     "The compiler is too old for the framework's headers: set CXX to gcc 9 or newer."),
    (r"compiler identification is unknown|is not able to compile|No CMAKE_CXX_COMPILER",
     "The C++ compiler does not work: try it on a small program, or set CXX to another."),
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far the build is: percent of its steps, and the step in a few words."""

    percent: int
    step: str


@dataclass(frozen=True)
class Failure:
    """Why the build failed: the first error, and a hint or ""."""

    error: str
    hint: str


def read_progress(line: str) -> Progress | None:
    """Return what a line of make's output says about progress, or None."""
    match = _PERCENT.match(line)
    if match is None:
        return None
    step = match[2].strip()
    if target := _TARGET.search(step):
        step = f"{target[1]}: {target[2]}"
    elif linked := _LINKED.match(step):
        step = f"linking {linked[1]}"
    return Progress(int(match[1]), step)


def find_failure(lines: Sequence[str]) -> Failure:
    """Return the first error of the nearest kind in a failed build's output."""
    for pattern in _ERRORS:
        for index, line in enumerate(lines):
            if not pattern.search(line):
                continue
            error = line.strip()
            if "CMake Error" in line:
                # The reason is on the lines that follow, up to an empty pair or the call stack.
                rest = [text.strip() for text in lines[index + 1 : index + 8] if text.strip()]
                error = " ".join([error, *rest[:3]])
            return Failure(error, _find_hint(error, lines))
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return Failure(last, _find_hint(last, lines))


def _find_hint(error: str, lines: Sequence[str]) -> str:
    for text in (error, "\n".join(lines)):
        for pattern, hint in _HINTS:
            if re.search(pattern, text):
                return hint
    return ""
