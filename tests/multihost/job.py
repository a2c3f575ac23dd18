"""A ``horovodrun`` on one host of a network, with workers on several."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.multihost.network import Host, Network
from tests.system.command import make_environment

__all__ = ["HOROVODRUN", "Job", "list_command_lines", "make_variables"]

HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
GRACE_S = 15.0


def make_variables(network: Network, **variables: str) -> dict[str, str]:
    """Return the environment of a command on a host: its ssh leaves no traces."""
    ours = {
        "PATH": f"{network.path}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(network.path.parent),  # horovodrun keeps a cache there
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return make_environment(**ours | variables)


class Job:
    """A running command, ``horovodrun`` or another that starts it, on one host.

    Args:
        network: Its hosts.
        folder: For its output.
        command: Words.
        on: The name of the host that it is started on, in this process's folder.
        variables: Further ones.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        command: Sequence[str],
        on: str = "hosta",
        **variables: str,
    ) -> None:
        self._network = network
        self._log = folder / "output.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                network[on].enter(*command, folder=os.getcwd()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=make_variables(network, **variables),
                start_new_session=True,
            )

    @classmethod
    def train(
        cls,
        network: Network,
        folder: Path,
        script: Sequence[str],
        options: Sequence[str] = (),
        hosts: Sequence[str] = ("-H", "hosta:1,hostb:1"),
        **variables: str,
    ) -> Job:
        """Start ``horovodrun`` with a Python script and its arguments."""
        ssh = ["--ssh-identity-file", str(network.identity)]
        command = [HOROVODRUN, "-np", "2", "--gloo", "--disable-cache", *ssh, *hosts, *options]
        return cls(network, folder, [*command, sys.executable, *script], **variables)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Wait until it has printed a text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.running, self.explain(f"it ended without {text!r}")
            assert time.monotonic() < deadline, self.explain(f"no {text!r} in {timeout_s:.0f} s")
            time.sleep(0.05)

    def finish(self, timeout_s: float = 90) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.explain(f"not done in {timeout_s:.0f} s")) from None

    def end(self) -> None:
        """End whatever still runs of it, on all hosts."""
        if self.running:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        for host in self._network.hosts.values():
            for process in host.list_processes():
                process.kill()
        self._process.wait()

    def explain(self, problem: str) -> str:
        """Describe it around a problem, with the last lines of its output."""
        return "\n".join([problem, "last lines:", *self.output.splitlines()[-60:]])


def list_command_lines(host: Host) -> list[str]:
    """Return the command lines of a host's processes."""
    lines = []
    for process in host.list_processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            lines.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return lines
