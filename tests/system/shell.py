"""Commands as a page has them: split into single ones, and run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.distributed.launch import end_processes
from tests.system.command import make_environment

__all__ = ["run_commands", "split_commands"]


def split_commands(text: str) -> list[str]:
    """Split shell text into commands; lines that a backslash or a quote continues stay together."""
    commands: list[str] = []
    pending = ""
    for line in text.splitlines():
        pending += f"{line}\n"
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # within quotes
            continue
        if words:
            commands.append(pending.strip())
        pending = ""
    assert not pending, f"not whole: {pending!r}"
    return commands


def run_commands(
    commands: Sequence[str],
    folder: Path,
    changes: Mapping[str, str] | None = None,
    codes: Sequence[int] = (0,),
    timeout_s: float = 300,
    **variables: object,
) -> list[str]:
    """Run commands in one folder, each in a shell of its own, with the programs of this Python.

    Args:
        commands: As a page has them.
        folder: Where they run.
        changes: What of the page's text is replaced, and by what: places that are the reader's own,
            and sizes that would take too long. Each must occur.
        codes: The exit codes that are right.
        timeout_s: Of each command.
        variables: Set beside those of this process; None removes one.

    Returns:
        What each command printed, its errors too.

    Raises:
        AssertionError: A command ended with another exit code; with what it printed.
    """
    changes = changes or {}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = make_environment(**{"PATH": path, **variables})
    for old in changes:
        assert any(old in command for command in commands), f"{old!r} is in none of {commands}"
    printed = []
    for command in commands:
        run = command
        for old, new in changes.items():
            run = run.replace(old, new)
        output, code = _run(run, folder, timeout_s, environment)
        tail = f"{run}\n{output[-8000:]}"
        assert code is not None, f"not done in {timeout_s:.0f} s: {tail}"
        assert code in codes, f"exit {code} of: {tail}"
        printed.append(output)
    return printed


def _run(
    command: str, folder: Path, timeout_s: float, environment: Mapping[str, str]
) -> tuple[str, int | None]:
    """Return what a command printed and its exit code, None for one ended at the deadline."""
    with tempfile.TemporaryFile() as log:  # what outlives the shell cannot block a file
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_processes(process)
        log.seek(0)
        return log.read().decode(errors="replace"), code
