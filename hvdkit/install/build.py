"""Building the wheel: one child process group, its output in a log, progress passed on."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import hvdkit
from hvdkit.errors import BuildError
from hvdkit.install.build_log import Progress, find_failure, read_progress
from hvdkit.install.edits import apply_edits
from hvdkit.install.plan import Plan
from hvdkit.install.process import end_process_group
from hvdkit.install.sdist import HOROVOD_VERSION
from hvdkit.install.tools import cmake_program, join_python_path

__all__ = ["BUILD_RECORD", "build_wheel", "describe_build", "make_environment", "prepare_source"]

BUILD_RECORD = "hvdkit_build.json"
# Variables that would change the build behind the plan's back; those that say where a
# library is (HOROVOD_NCCL_HOME and the like) stay.
_OVERRULED = re.compile(
    r"HOROVOD_(WITH(OUT)?_\w+|GPU\w*|CPU_OPERATIONS|CMAKE|LOCAL_VERSION|SKIP_COMPILE|DEBUG"
    r"|ALLOW_MIXED_GPU_IMPL)|CMAKE_GENERATOR|MAKEFLAGS|MAKELEVEL|MFLAGS"
)


def prepare_source(source: Path, plan: Plan) -> None:
    """Make the plan's edits in an unpacked source, and leave a record that the wheel carries."""
    apply_edits(source, plan.edits)
    record = json.dumps(describe_build(plan), indent=1, sort_keys=True)
    (source / "horovod" / BUILD_RECORD).write_text(record + "\n", encoding="utf-8")


def describe_build(plan: Plan) -> dict[str, object]:
    """Return the record of a build: what it was built against, and the key of its wheel."""
    compiler = plan.toolchain.compiler
    return {
        "schema": 1,
        "hvdkit": hvdkit.__version__,
        "horovod": HOROVOD_VERSION,
        "key": plan.key,
        "frameworks": {framework.name: framework.version for framework in plan.frameworks},
        "controllers": list(plan.controllers),
        "gpu": plan.gpu,
        "mpi": plan.mpi.version if plan.mpi else None,
        "compiler": f"{Path(compiler.path).name} {compiler.version}" if compiler else None,
        "edits": [edit.name for edit in plan.edits],
    }


def build_wheel(
    plan: Plan,
    source: Path,
    workspace: Path,
    log: Path,
    tools: Path,
    on_progress: Callable[[Progress], None],
) -> Path:
    """Build the wheel of a prepared source.

    Whatever ends this call (an error, Ctrl-C, a signal turned into an exception) ends every
    process of the build.

    Args:
        plan: The plan.
        source: The root of the prepared source.
        workspace: A folder for temporary files, on a disk with room.
        log: The file that gets the whole output.
        tools: The folder with private build tools; it may be empty or absent.
        on_progress: Called for each step of the compilation.

    Raises:
        BuildError: The build failed; carries the first error, a hint and the log's path.
    """
    out = workspace / "dist"
    scratch = workspace / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "setup.py", "bdist_wheel", "--dist-dir", str(out)]
    environment = make_environment(plan, tools, scratch)
    lines: list[str] = []
    with log.open("w", encoding="utf-8") as sink:
        sink.write(f"# {' '.join(command)}\n")
        sink.writelines(f"# {name}={value}\n" for name, value in plan.environment.items())
        process = subprocess.Popen(
            command,
            cwd=source,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                sink.write(line)
                lines.append(line.rstrip("\n"))
                if progress := read_progress(line):
                    on_progress(progress)
            code = process.wait()
        except BaseException:
            end_process_group(process)
            raise
    wheels = sorted(out.glob("horovod-*.whl"))
    if code or len(wheels) != 1:
        failure = find_failure(lines)
        hint = f"\nHint: {failure.hint}" if failure.hint else ""
        raise BuildError(f"Horovod did not build: {failure.error}{hint}\nLog: {log}")
    return wheels[0]


def make_environment(plan: Plan, tools: Path, scratch: Path) -> Mapping[str, str]:
    """Return the variables of the build: the user's, overruled by the plan's."""
    environment = {
        name: value for name, value in os.environ.items() if not _OVERRULED.fullmatch(name)
    }
    environment.update(plan.environment)
    environment["TMPDIR"] = str(scratch)
    if plan.toolchain.compiler:
        # Keep the arguments of a CXX such as "ccache g++".
        environment.setdefault("CXX", plan.toolchain.compiler.path)
    if tools.is_dir():
        environment["PYTHONPATH"] = join_python_path(tools)
    cmake = plan.toolchain.cmake.path if plan.toolchain.cmake else cmake_program(tools)
    if cmake:
        environment["HOROVOD_CMAKE"] = str(cmake)
    return environment
