"""A probe that runs on a host, reached by ssh as horovodrun does; and what ssh's errors mean."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.install.hosts import probe

__all__ = ["Party", "UnreachableError", "ssh_command"]

CONNECT_S = 10  # as horovodrun has it
_CLOSE_S = 2.0
_BOOT = "import sys; exec(compile(sys.stdin.read(int(sys.stdin.readline())), 'probe', 'exec'))"
_TRIAL = [sys.executable, "-I", "-c", "import json, resource"]
# What ssh says -> what to do.
_REMEDIES = {
    "Permission denied": "ssh-copy-id {host}, or name the key that {host} lets in with "
    "--ssh-identity-file: horovodrun cannot type a password",
    "Host key verification failed": "ssh-keygen -R {host}, if the new host key is right",
    "Connection refused": "start an ssh server on {host}, or give its port with --ssh-port",
    "timed out": "see that {host} is up, and that no firewall is between",
    "No route to host": "see that {host} is up and on a network that is reached from here",
    "Could not resolve hostname": "put {host} into /etc/hosts or DNS",
    "UNPROTECTED PRIVATE KEY FILE": "chmod 600 the key",
}


class UnreachableError(Exception):
    """No probe answers on a host; the message says why.

    Attributes:
        topic: "ssh", "python" or "probe".
        remedy: What to do.
    """

    def __init__(self, topic: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.topic = topic
        self.remedy = remedy


def ssh_command(host: str, command: str, port: int | None, identity: Path | None) -> list[str]:
    """Return the words of ``ssh``, with horovodrun's options; it asks nobody for anything."""
    return [
        *("ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no"),
        *("-o", "BatchMode=yes", host),
        *(("-p", str(port)) if port is not None else ()),
        *(("-i", str(identity)) if identity is not None else ()),
        *("-o", f"ConnectTimeout={CONNECT_S}", command),
    ]


class Party:
    """A probe on one host.

    Args:
        host: Its name.
        local: Whether horovodrun starts its workers without ssh.
        port: Of the ssh server; default as ssh's configuration has it.
        identity: The private key file; likewise.
    """

    def __init__(self, host: str, local: bool, port: int | None, identity: Path | None) -> None:
        self.host = host
        words = [sys.executable, "-I", "-c", _BOOT]
        self._command = words if local else ssh_command(host, _exec(words), port, identity)
        self._local = local
        self._process: asyncio.subprocess.Process | None = None
        self._errors: asyncio.Task[bytes] | None = None

    async def start(self) -> None:
        """Start the probe; whether that works is known from its first answer.

        Raises:
            UnreachableError: There is no ssh program.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=1 << 24,
                start_new_session=True,  # no terminal to ask on
            )
        except FileNotFoundError as error:
            remedy = "apt-get install openssh-client"
            raise UnreachableError("ssh", f"no such program: {error.filename}", remedy) from error
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(self._process.stderr.read())
        source = Path(probe.__file__).read_text(encoding="ascii")
        await self._write(f"{len(source)}\n{source}")

    async def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Put a question to the probe, and return its answer.

        Raises:
            UnreachableError: None came in time, or the probe or ssh has ended.
        """
        try:
            return await asyncio.wait_for(self._ask(question), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            remedy = f"see what keeps {self.host} busy, or give more time with --timeout"
            text = f"no answer within {timeout_s:g} s"
            raise UnreachableError("probe", text, remedy) from None

    async def close(self) -> None:
        """End the probe: by the end of its input, or by a signal to what is left here."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        except (asyncio.TimeoutError, TimeoutError):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._errors is not None:
            self._errors.cancel()

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        await self._write(json.dumps(question) + "\n")
        # Other lines are what the host's start files print.
        while line := (await self._process.stdout.readline()).decode(errors="replace"):
            _, mark, text = line.partition(probe.MARK)
            if mark:
                return json.loads(text)
        raise await self._explain()

    async def _write(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # reading says why
            self._process.stdin.write(text.encode("ascii"))
            await self._process.stdin.drain()

    async def _explain(self) -> UnreachableError:
        """Say why the probe has ended without an answer."""
        assert self._process is not None
        assert self._errors is not None
        code = await self._process.wait()
        errors = (await self._errors).decode(errors="replace").strip()
        said = errors.splitlines()[-1].strip() if errors else f"exit code {code}"
        if code == 255 and not self._local:
            for words, remedy in _REMEDIES.items():
                if words in errors:
                    return UnreachableError("ssh", said, remedy.format(host=self.host))
            return UnreachableError("ssh", said, f"see what this says: ssh -v {self.host} true")
        if code in (126, 127):
            text = f"{sys.executable} does not run there: {said}"
            remedy = "have the same Python environment at the same path on each host"
            return UnreachableError("python", text, remedy)
        return UnreachableError(
            "probe", said, f"run on {self.host}: {sys.executable} -I -c 'import json'"
        )


def _exec(words: list[str]) -> str:
    return f"exec {shlex.join(words)}"
