"""Running `hvdkit` as a user does: a process of its own, from the source tree."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_hvdkit(*arguments, timeout_s=240, python=sys.executable, **variables):
    """Run a command; a variable whose value is None is removed. Return the finished process."""
    return subprocess.run(
        [python, "-m", "hvdkit.cli", *map(str, arguments)],
        cwd=ROOT,
        env=make_environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def make_environment(**variables):
    """Return this environment, the source tree importable, with some variables changed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    # `hvdkit` must not inherit the choices of whoever runs the tests.
    for name in [n for n in environment if n.startswith("HOROVOD_")] + ["CXX", "CXXFLAGS"]:
        environment.pop(name, None)
    environment.update({name: str(value) for name, value in variables.items() if value is not None})
    for name, value in variables.items():
        if value is None:
            environment.pop(name, None)
    return environment


def find_processes_naming(text, suspended=False):
    """Return the processes, zombies left out, that have a text in command, folder or variables.

    With ``suspended`` only those that a signal has stopped.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            place = os.readlink(folder / "cwd")
            variables = (folder / "environ").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if (text in words or text in place or text in variables) and (
            state == "T" or not suspended
        ):
            found.append((folder.name, words))
    return found
