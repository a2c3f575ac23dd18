"""Proving a Horovod: its collectives, checked by arithmetic under horovodrun, with a deadline."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hvdkit
from hvdkit.errors import HvdkitError
from hvdkit.install.check_worker import MARK
from hvdkit.install.process import end_process_group

__all__ = ["Outcome", "Proof", "check_framework"]

# horovodrun ends its workers within 5 s of SIGTERM; killing it sooner would orphan them.
GRACE_S = 15.0
# How horovodrun ("[0]<stderr>:") and mpirun ("[1,0]<stderr>:") mark what a worker printed.
_WORKER_LINE = re.compile(r"\[[\d,]+\]<std(out|err)>:")
_LAST_LINES = 20


@dataclass(frozen=True)
class Outcome:
    """One check on all ranks: its name, and each failing rank's error ("" for no word of it)."""

    name: str
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Proof:
    """What a framework's workers reported.

    Attributes:
        framework: "torch" or "tensorflow".
        outcomes: One a check, in the order in which they ran.
        failure: What went wrong with the run as a whole, or "".
        last_lines: The end of what the workers printed, or of the launcher's own words if they
            printed nothing, when something went wrong.
    """

    framework: str
    outcomes: tuple[Outcome, ...]
    failure: str
    last_lines: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every check passed on every rank."""
        return not self.failure and not any(outcome.errors for outcome in self.outcomes)


def check_framework(
    framework: str,
    np: int,
    controller: str = "gloo",
    hosts: str | None = None,
    launcher_options: Sequence[str] = (),
    deadline_s: float = 120.0,
) -> Proof:
    """Run the checks of one framework under horovodrun.

    Args:
        framework: "torch" or "tensorflow".
        np: The number of workers.
        controller: "gloo" or "mpi".
        hosts: As for ``horovodrun -H``, for example "a:1,b:1"; default this machine.
        launcher_options: More options of horovodrun.
        deadline_s: After so many seconds everything is ended and the proof has failed.

    Raises:
        HvdkitError: ``np`` is not positive.
    """
    if np < 1:
        raise HvdkitError(f"The number of workers must be at least 1, found {np}.")
    command = [
        *(sys.executable, "-m", "horovod.runner.launch", "-np", str(np), f"--{controller}"),
        *(("-H", hosts) if hosts else ()),
        *launcher_options,
        *(sys.executable, "-m", "hvdkit.install.check_worker", framework, "--size", str(np)),
    ]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            # From /, python -m finds no folder named torch; it is there on every host.
            cwd="/",
            env=_make_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        failure = ""
        try:
            code = process.wait(timeout=deadline_s)
            if code:
                failure = f"horovodrun exited with {_describe_exit(code)}"
        except subprocess.TimeoutExpired:
            end_process_group(process, GRACE_S)
            failure = f"no end within {deadline_s:g} s; the workers were stopped"
        except BaseException:
            end_process_group(process, GRACE_S)
            raise
        output.seek(0)
        return judge(framework, np, output.read().splitlines(), failure)


def judge(framework: str, np: int, lines: Sequence[str], failure: str) -> Proof:
    """Turn the workers' output into a proof; a rank that says nothing of a check has failed it.

    Args:
        framework: Whose workers they were.
        np: The number of ranks that must report.
        lines: The output of horovodrun.
        failure: What went wrong with the run as a whole, or "".
    """
    reports: dict[str, dict[int, str]] = {}
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            try:
                report = json.loads(text)
                reports.setdefault(report["check"], {})[int(report["rank"])] = report["error"]
            except (ValueError, KeyError, TypeError):
                continue  # a line that the launcher tore; its rank counts as silent
    outcomes = tuple(
        Outcome(
            name,
            {
                rank: ranks.get(rank, "no report")
                for rank in range(np)
                if ranks.get(rank, "no report")
            },
        )
        for name, ranks in reports.items()
    )
    if not reports and not failure:
        failure = "no worker reported anything"
    troubled = failure or any(outcome.errors for outcome in outcomes)
    others = [line for line in lines if MARK not in line]
    # The launcher's traceback comes after the workers' and says only that one of them failed.
    words = [line for line in others if _WORKER_LINE.match(line)] or others
    return Proof(framework, outcomes, failure, tuple(words[-_LAST_LINES:]) if troubled else ())


def _make_environment() -> dict[str, str]:
    environment = dict(os.environ)
    package = str(Path(hvdkit.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [package, environment.get("PYTHONPATH", "")])
    )
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return environment


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
