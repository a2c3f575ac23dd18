"""Workers of one candidate, under horovodrun, that run only when it is their turn.

Every candidate has processes of its own, because threads of another one in the same process
(Horovod's wakes a thousand times a second) would be timed with it. All stay alive for the
whole measurement, so that rounds can alternate quickly; those not in turn are suspended.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, cast

from hvdkit.bench.catalog import TIMEOUT_S
from hvdkit.errors import HvdkitError

__all__ = ["Team"]

POLL_S = 0.2
SHUTDOWN_S = 30
LAST_WORDS_S = 5


class Team:
    """``size`` workers that answer requests when it is their turn; a context manager."""

    def __init__(
        self,
        title: str,
        worker: Sequence[str],
        *,
        size: int,
        threads: int,
        environment: Mapping[str, str],
    ):
        """Launch the workers; ``wait_until_ready`` says when they can run.

        Args:
            title: What the team is, for messages.
            worker: The module that a worker runs, which calls ``hvdkit.bench.worker.serve``, and
                its arguments; ``--threads`` and ``--folder`` are added.
            size: Processes.
            threads: Compute threads of each.
            environment: Further variables.
        """
        self.size = size
        self.hello: list[dict[str, Any]] = []
        self._title = title
        self._connections: list[Connection] = []
        self._folder = Path(tempfile.mkdtemp(prefix="hvdkit-bench-"))
        self._listener = Listener(str(self._folder / "socket"), "AF_UNIX", backlog=size)
        # accept() has no timeout of its own; a worker that dies early must not hang the driver.
        cast(Any, self._listener)._listener._socket.settimeout(POLL_S)
        self._log = self._folder / "log"
        launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(size), "--gloo"]
        worker = [sys.executable, "-m", *worker]
        worker += ["--threads", str(threads), "--folder", str(self._folder)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*launcher, *worker],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_make_environment(environment, threads),
                start_new_session=True,
            )

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *exception: object) -> None:
        """End the workers, however far they got."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.close()
        self._listener.close()
        try:
            self._process.wait(SHUTDOWN_S if self.hello and exception[0] is None else POLL_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.terminate()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait_until_ready(self, deadline_s: float) -> None:
        """Block until every worker is ready to answer, then suspend them.

        Raises:
            HvdkitError: the launch failed, or took longer than ``deadline_s`` seconds.
        """
        end_s = time.monotonic() + deadline_s
        while len(self._connections) < self.size:
            try:
                self._connections.append(cast(Connection, self._listener.accept()))
            except TimeoutError:
                if self._process.poll() is not None:
                    raise self._explain("ended before it was ready") from None
                if time.monotonic() > end_s:
                    raise self._explain(f"was not ready after {deadline_s:.0f} s") from None
        hellos = self._receive()
        order = sorted(range(self.size), key=lambda index: hellos[index]["rank"])
        self.hello = [hellos[index] for index in order]
        self._connections = [self._connections[index] for index in order]
        self._signal(signal.SIGSTOP)

    def ask(self, request: Any) -> list[Any]:
        """Let the workers answer ``request``; return the answers in the order of the ranks."""
        self._signal(signal.SIGCONT)
        answers = self._exchange(request)
        self._signal(signal.SIGSTOP)
        return answers

    def finish(self) -> list[int]:
        """Return each worker's peak resident size in bytes, and let the workers end."""
        self._signal(signal.SIGCONT)
        return self._exchange(None)

    def _exchange(self, request: Any) -> list[Any]:
        try:
            for connection in self._connections:
                connection.send(request)
        except OSError:
            raise self._explain("broke off") from None
        return self._receive()

    def _receive(self) -> list[Any]:
        """Return one answer of each worker, in the order of the connections."""
        answers: dict[Connection, Any] = {}
        while len(answers) < self.size:
            pending = [one for one in self._connections if one not in answers]
            for connection in cast("list[Connection]", wait(pending)):
                try:
                    answers[connection] = connection.recv()
                except (EOFError, OSError):
                    raise self._explain("broke off") from None
        return [answers[connection] for connection in self._connections]

    def _signal(self, number: int) -> None:
        for hello in self.hello:
            try:
                os.kill(hello["pid"], number)
            except ProcessLookupError:
                continue

    def _explain(self, what: str) -> HvdkitError:
        # The connection ends before the launcher has passed on why.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LAST_WORDS_S)
        log = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        tail = "\n".join(log[-30:])
        return HvdkitError(f"{self._title} {what}; its last lines were:\n{tail}")


def _make_environment(more: Mapping[str, str], threads: int) -> dict[str, str]:
    environment = {**os.environ, **more}
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(TIMEOUT_S)
    # A source checkout that is not installed must still be found by the workers.
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
