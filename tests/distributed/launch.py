"""Start worker files under ``horovodrun`` and say which of their checks passed on every rank.

How to write a distributed test: put functions named ``check_*`` into ``worker_TOPIC.py``,

    import hvdkit.torch as hvd
    from tests.distributed.worker import run_checks

    def check_ranks_are_counted():
        assert hvd.size() == 2

    if __name__ == "__main__":
        run_checks(globals())

and launch the file once for all of them in ``test_TOPIC.py``; every check is a test of its own:

    WORKER = Path(__file__).with_name("worker_TOPIC.py")

    @pytest.fixture(scope="module")
    def run():
        return launch(WORKER)

    @pytest.mark.parametrize("check", check_names(WORKER))
    def test_check(run, check):
        run.require(check)

Checks run in the order of the file, in step on all ranks; the first that fails ends the run, and
those after it fail as "did not run". ``python -m tests.distributed.launch FILE [CHECK ...]``
runs a worker file (or the named checks of it) by hand.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 120
GRACE_S = 10.0

__all__ = ["WorkerRun", "check_names", "end_processes", "launch", "run_workers"]


@dataclass(frozen=True)
class WorkerRun:
    """What one ``horovodrun`` left behind."""

    command: list[str]
    exit_code: int | None  # None: ended at the deadline
    output: str
    ranks: dict[int, dict]  # the result file of each rank that wrote one
    size: int

    @property
    def passed(self) -> list[str]:
        """Names of the checks that passed on every rank, in order."""
        if len(self.ranks) != self.size:
            return []
        logs = [result["passed"] for result in self.ranks.values()]
        return [name for name in logs[0] if all(name in log for log in logs)]

    @property
    def failed(self) -> list[str]:
        """Names of the checks that some rank reported as failed."""
        return sorted({r["failed"] for r in self.ranks.values() if r["failed"]})

    def require(self, check: str) -> None:
        """Fail unless ``check`` passed on every rank and the run ended as it should.

        A run that a later check broke is still good for the checks that passed before; one
        that broke outside of a check (at exit, say) is good for none.
        """
        problem = self.explain(f"{check} did not pass on every rank")
        assert self.exit_code == 0 or self.failed, problem
        assert check in self.passed, problem

    def explain(self, problem: str) -> str:
        """Describe the run around ``problem``, with the last lines of its output."""
        tail = "\n".join(self.output.splitlines()[-TAIL_LINES:])
        ended = "ended at the deadline" if self.exit_code is None else f"exit {self.exit_code}"
        return (
            f"{problem} ({ended}; failed: {self.failed or 'none reported'}; result files of "
            f"ranks {sorted(self.ranks)}, {self.size} expected)\n"
            f"command: {' '.join(self.command)}\nlast lines:\n{tail}"
        )


def check_names(worker: Path) -> list[str]:
    """List the ``check_*`` functions at the top level of a worker file, without running it."""
    tree = ast.parse(worker.read_text(encoding="utf-8"), str(worker))
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    checks = [name for name in names if name.startswith("check_")]
    assert checks, f"{worker} defines no function named check_*"
    assert len(set(checks)) == len(checks), f"{worker} defines a check twice"
    return checks


def run_workers(
    script: Path,
    np: int = 2,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180,
) -> WorkerRun:
    """Run a worker file as ``launch`` does and demand that it succeeded as a whole.

    Raises:
        AssertionError: On a non-zero exit, a missing result file, a check that failed or did
            not run, or at the deadline; with the last lines of the output.
    """
    run = launch(script, np, args, env, timeout_s)
    expected = [a for a in args if a.startswith("check_")] or check_names(Path(script))
    assert run.exit_code == 0, run.explain(f"{script} failed")
    assert run.passed == expected, run.explain(f"expected {expected}, passed {run.passed}")
    return run


def launch(
    script: Path,
    np: int = 2,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180,
) -> WorkerRun:
    """Run ``horovodrun -np NP --gloo python SCRIPT ARGS`` and collect what its ranks report.

    Args:
        script: A worker file.
        np: The number of workers.
        args: Passed on to the worker file.
        env: Variables to set beside the harness's own.
        timeout_s: At this deadline the whole run is ended, workers included.
    """
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [str(horovodrun), "-np", str(np), "--gloo", sys.executable, str(script), *args]
    with tempfile.TemporaryDirectory(prefix="hvdkit-test-") as scratch:
        results = Path(scratch, "results")
        results.mkdir()
        log = Path(scratch, "output.txt")
        # A file, not a pipe: a worker that outlives the launcher must not block the test.
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(results, np, timeout_s) | dict(env or {}),
            )
            try:
                exit_code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                end_processes(process)
        output = log.read_text(encoding="utf-8", errors="replace")
        ranks = {}
        for path in sorted(results.glob("rank-*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            ranks[result["rank"]] = result
    return WorkerRun(command, exit_code, output, ranks, np)


def _environment(results: Path, np: int, timeout_s: float) -> dict[str, str]:
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HVDKIT_TEST_RESULTS": str(results),
        "HVDKIT_TEST_SIZE": str(np),
        "HVDKIT_TEST_TIMEOUT_S": str(timeout_s),
    }


def end_processes(process: subprocess.Popen) -> None:
    """End the leader of a session and everything below it; workers have sessions of their own."""
    if process.poll() is not None:
        return
    import psutil

    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in below:
        if child.is_running():  # compares the start time too, so never another process
            child.kill()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    finished = launch(Path(sys.argv[1]), args=sys.argv[2:])
    print(finished.explain(f"passed: {finished.passed}"))
    sys.exit(finished.exit_code != 0)
