"""Several "hosts" on one machine: addresses of the loopback interface with an OpenSSH server.

127.0.0.2 and its like are no addresses that Horovod takes for its own machine, so it starts their
workers by ssh, watches them and excludes them as it does with real hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.launch import ROOT
from tests.system.ssh_server import SshServer, make_key, write_client

HOSTS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
MARK = "HVDKIT_TEST_JOB"
GRACE_S = 15.0

__all__ = ["HOSTS", "ElasticJob", "Loopback", "serve"]


class Loopback:
    """A running OpenSSH server: its port, its key, and an ``ssh`` that leaves no traces.

    Attributes:
        port: Where the server listens, on every address of ``HOSTS``.
        identity: The private key that it lets in.
        path: A folder with an ``ssh`` that notes no host keys in the user's own files.
    """

    def __init__(self, folder: Path) -> None:
        self.identity = make_key(folder / "key")
        self.path = write_client(folder / "bin")
        self.port = _find_port()
        authorized = self.identity.with_suffix(".pub")
        self._server = SshServer(folder, HOSTS, self.port, authorized)

    @contextlib.contextmanager
    def running(self) -> Iterator[Loopback]:
        """Serve until the block ends."""
        with self._server.running(self._answers):
            yield self

    def _answers(self) -> bool:
        try:
            socket.create_connection((HOSTS[-1], self.port), timeout=1).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Loopback]:
    """Start an OpenSSH server with keys of its own in ``folder``; end it with the block."""
    with Loopback(folder).running() as loopback:
        yield loopback


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        return probe.getsockname()[1]


class ElasticJob:
    """One ``horovodrun`` of an elastic job, whose hosts can change while it runs.

    Args:
        loopback: The server that workers are started through.
        folder: For what the job writes: its hosts, output, and results of its workers.
        script: A Python file that workers run; it writes JSON files into the folder that
            ``HVDKIT_TEST_RESULTS`` names.
        hosts: Those to start with, one worker on each.
        args: Passed on to the script.
        env: Further variables.
    """

    def __init__(
        self,
        loopback: Loopback,
        folder: Path,
        script: Path,
        hosts: Sequence[str],
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.results = folder / "results"
        self.results.mkdir(parents=True)
        self._hosts = folder / "hosts"
        self._log = folder / "output.txt"
        self.set_hosts(hosts)
        discover = folder / "discover.sh"
        discover.write_text(f"#!/bin/sh\ncat {self._hosts}\n")
        discover.chmod(discover.stat().st_mode | stat.S_IXUSR)
        command = [
            str(Path(sys.executable).with_name("horovodrun")),
            *("-np", str(len(hosts)), "--min-np", "1", "--max-np", str(len(HOSTS))),
            *("--host-discovery-script", str(discover), "--network-interfaces", "lo"),
            *("--ssh-port", str(loopback.port), "--ssh-identity-file", str(loopback.identity)),
            *("--disable-cache", "--gloo", sys.executable, str(script), *args),
        ]
        ours = {
            "PATH": f"{loopback.path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HVDKIT_TEST_RESULTS": str(self.results),
            MARK: self.id,
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | ours | dict(env or {}),
            )

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Change what the discovery script reports, in one piece."""
        part = self._hosts.with_suffix(".part")
        part.write_text("".join(f"{host}:1\n" for host in hosts))
        part.rename(self._hosts)

    @property
    def output(self) -> str:
        """What launcher and workers have printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, name: str, timeout_s: float = 45) -> dict[str, Any]:
        """Wait until a worker has written the file ``name``, and return what it holds."""
        path = self.results / name
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            assert self._process.poll() is None, self.explain(f"it ended without {name}")
            assert time.monotonic() < deadline, self.explain(f"no {name} in {timeout_s:.0f} s")
            time.sleep(0.05)
        return json.loads(path.read_text(encoding="utf-8"))

    def finish(self, timeout_s: float = 60) -> dict[str, dict[str, Any]]:
        """Wait for the end, demand a good one, and return each worker's results by its host."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.explain(f"not done in {timeout_s:.0f} s")) from None
        assert code == 0, self.explain(f"exit code {code}")
        left = self._await_no_process()
        assert not left, self.explain(f"processes left behind: {left}")
        return {
            path.stem.removeprefix("done-"): json.loads(path.read_text(encoding="utf-8"))
            for path in self.results.glob("done-*.json")
        }

    def end(self) -> None:
        """End whatever still runs of the job."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        for process in self.find_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def find_processes(self) -> list[psutil.Process]:
        """List processes with the job's mark in their environment, the launcher left out."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.id and process.pid != self._process.pid:
                    found.append(process)
        return found

    def explain(self, problem: str) -> str:
        """Describe the job around ``problem``, with the last lines of its output."""
        tail = "\n".join(self.output.splitlines()[-80:])
        return f"{problem}\nlast lines:\n{tail}"

    def _await_no_process(self) -> list[str]:
        deadline = time.monotonic() + GRACE_S
        while (found := self.find_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{process.pid} {process.name()}" for process in found if process.is_running()]
