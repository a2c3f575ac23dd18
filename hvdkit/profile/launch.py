"""Runs a command under horovodrun with the timeline on, and each rank's trace beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.trace import VARIABLE

__all__ = ["TIMELINE", "make_environment", "run_command", "warn_of_spinning"]

TIMELINE = "timeline.json"


def run_command(
    command: Sequence[str],
    workers: int,
    folder: Path,
    *,
    hosts: str | None = None,
    every_negotiation: bool = False,
) -> int:
    """Run a command on ``workers`` ranks; its output passes through. Return its exit status.

    Args:
        command: The program and its arguments.
        workers: Number of ranks.
        folder: Gets ``timeline.json`` and ``rank-N.jsonl``; on several hosts one that all share.
        hosts: As for ``horovodrun -H``.
        every_negotiation: Switch the response cache off, so that every negotiation says when each
            rank was ready.

    Raises:
        HvdkitError: There are files of an earlier run in the folder.
    """
    for path in (folder / TIMELINE, *folder.glob("rank-*.jsonl")):
        if path.exists():
            raise HvdkitError(f"{path} is there already: name an empty folder")
    launch = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(workers)]
    if hosts is not None:
        launch += ["-H", hosts]
    environment = make_environment(folder, every_negotiation=every_negotiation)
    with subprocess.Popen([*launch, *command], env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # horovodrun got it as well and ends its workers; what there is will be read.
                continue


def make_environment(folder: Path, *, every_negotiation: bool) -> dict[str, str]:
    """Return this process's environment with what makes workers record."""
    environment = {
        **os.environ,
        "HOROVOD_TIMELINE": str(folder / TIMELINE),
        # Tells ranks that came in the same cycle, in no order, from those that came one by one.
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        VARIABLE: str(folder),
    }
    if every_negotiation:
        environment["HOROVOD_CACHE_CAPACITY"] = "0"
    return environment


def warn_of_spinning(workers: int) -> str | None:
    """Say what the timeline itself costs where workers leave no core to it; else None.

    Horovod's thread that writes the timeline never sleeps.

    Source: horovod 0.28.1, common/timeline.cc, TimelineWriter::WriterLoop.
    """
    cores = len(os.sched_getaffinity(0))
    if workers < cores:
        return None
    return (
        f"writing the timeline keeps a core of rank 0's host busy, and {workers} worker(s) leave "
        f"none of its {cores}: steps are slower than without it, perhaps not equally on all ranks"
    )
