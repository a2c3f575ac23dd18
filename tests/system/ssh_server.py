"""What OpenSSH servers of tests have in common: fresh keys, a configuration, their processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

__all__ = ["SshServer", "make_key", "write_client"]

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
GRACE_S = 15.0


def make_key(path: Path) -> Path:
    """Make a key pair without a passphrase; return the private one's path."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def write_client(folder: Path, more: Sequence[str] = ()) -> Path:
    """Write an ``ssh`` that notes no host keys in the user's own files; return its folder."""
    folder.mkdir()
    ssh = folder / "ssh"
    options = ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", *more]
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {" ".join(options)} "$@"\n')
    ssh.chmod(0o755)
    return folder


class SshServer:
    """An OpenSSH server with a host key of its own.

    Args:
        folder: For its files.
        addresses: Where it listens.
        port: On which port.
        authorized: The public key that it lets in.
        enter: Words before its command line, to start it somewhere else.
    """

    def __init__(
        self,
        folder: Path,
        addresses: Sequence[str],
        port: int,
        authorized: Path,
        enter: Sequence[str] = (),
    ) -> None:
        self.authorized = folder / "authorized"
        self.log = folder / "sshd.log"
        shutil.copy(authorized, self.authorized)
        listening = "".join(f"ListenAddress {address}\n" for address in addresses)
        config = folder / "sshd_config"
        config.write_text(
            f"Port {port}\n{listening}HostKey {make_key(folder / 'host')}\n"
            f"AuthorizedKeysFile {self.authorized}\nPidFile none\nStrictModes no\n"
            "UsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\n"
        )
        self._command = [*enter, SSHD, "-D", "-e", "-f", str(config)]

    @contextlib.contextmanager
    def running(self, answers: Callable[[], bool]) -> Iterator[None]:
        """Serve until the block ends; ``answers`` says whether it can be reached by now."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd drops privileges there
        with self.log.open("wb") as log:
            server = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + GRACE_S
            while not answers():
                waiting = time.monotonic() < deadline and server.poll() is None
                assert waiting, f"sshd did not start:\n{self.log.read_text()}"
                time.sleep(0.05)
            yield
        finally:
            for process in psutil.Process(server.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            server.kill()
            server.wait()
