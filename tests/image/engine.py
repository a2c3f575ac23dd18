"""A Docker engine of the tests' own: its data, socket and processes, and no network to change."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["Engine", "running_engine"]

START_S = 60.0
GRACE_S = 30.0


class Engine:
    """A running engine.

    Attributes:
        environment: With it, docker and docker-compose talk to this engine.
    """

    def __init__(self, socket: Path) -> None:
        self.environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{socket}",
            # Every Docker has the classic builder; the other one may be absent.
            "DOCKER_BUILDKIT": "0",
            "BUILDKIT_PROGRESS": "plain",
        }

    def docker(
        self, *arguments: str, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run docker; demand that it succeeds unless told otherwise."""
        return self.call(["docker", *arguments], timeout_s, check)

    def call(
        self,
        command: Sequence[str],
        timeout_s: float,
        check: bool = True,
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program that talks to this engine; what it printed is in every error."""
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            words = " ".join(command)
            raise AssertionError(
                f"{words} exited with {done.returncode}:\n{done.stdout[-6000:]}\n"
                f"{done.stderr[-6000:]}"
            )
        return done

    def run(
        self,
        image: str,
        *command: str,
        options: Sequence[str] = (),
        timeout_s: float = 60.0,
        check: bool = True,
        network: str = "host",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a fresh container that is removed afterwards."""
        arguments = ("run", "--rm", f"--network={network}", *options, image, *command)
        return self.docker(*arguments, timeout_s=timeout_s, check=check)


@contextlib.contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """Run an engine in a folder until the block ends; nothing of it stays."""
    # An engine's socket has a path of at most 107 characters, and a test's folder may be longer.
    socket = Path(f"/run/hvdkit-test-{os.getpid()}.sock")
    folder.mkdir()
    log = folder / "dockerd.log"
    command = [
        *("dockerd", "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
        *("--pidfile", str(folder / "pid"), "--host", f"unix://{socket}"),
        *("--bridge=none", "--iptables=false", "--ip6tables=false"),
    ]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    engine = Engine(socket)
    try:
        _await_engine(engine, process, log)
        yield engine
    finally:
        _end(engine, process)
        _unmount_below(folder)
        socket.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _await_engine(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while engine.docker("info", check=False).returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").splitlines()
            raise AssertionError("\n".join(["dockerd does not answer:", *lines[-20:]]))
        time.sleep(0.2)


def _end(engine: Engine, process: subprocess.Popen[bytes]) -> None:
    """End what runs in containers, then the engine, which ends its containerd."""
    if process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            names = engine.docker("ps", "--all", "--quiet", check=False).stdout.split()
            if names:
                engine.docker("rm", "--force", "--volumes", *names, check=False)
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(GRACE_S)


def _unmount_below(folder: Path) -> None:
    """Unmount what an engine that was killed has left below a folder, the deepest first."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    places = [line.split()[1] for line in mounts]
    for place in sorted((p for p in places if p.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False, timeout=GRACE_S)
