"""The slots of a benchmark: where its workers can run, on this host, on others, or in a job.

In each slot sits a keeper (``hvdkit.bench.keeper``), launched by horovodrun, or one for each rank
of the job that the benchmark was started in. Teams of workers are started under the keepers, with
a rendezvous of Horovod's own kind for each, so that many can live side by side.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from hvdkit.bench.keeper import KEY_VARIABLE, receive, send
from hvdkit.bench.team import Team
from hvdkit.errors import HvdkitError
from hvdkit.launch.rendezvous import Rendezvous

__all__ = ["ASSEMBLE_S", "TIMEOUT_S", "Crew"]

# Teams are suspended while another one runs; no collective may take that for a dead peer.
TIMEOUT_S = 86_400
ASSEMBLE_S = 120
POLL_S = 0.2
SHUTDOWN_S = 30
HELLO_S = 10
LAST_WORDS_S = 5


class Crew:
    """Keepers in ``size`` slots; a context manager, at whose end no worker is left.

    Attributes:
        size: Number of slots.
        hosts: Name of the host of each slot.
    """

    def __init__(self, size: int, *, controller: str = "gloo") -> None:
        """Listen for keepers; ``launch`` starts them, or a job's other ranks do.

        Args:
            size: Number of slots.
            controller: "gloo", or "mpi" for workers that mpirun's environment ties together: one
                team, of as many workers as there are slots.
        """
        self.size = size
        self.hosts: list[str] = []
        self.key = secrets.token_bytes(32)
        self._controller = controller
        self._launcher: subprocess.Popen[bytes] | None = None
        self._own_keeper: subprocess.Popen[bytes] | None = None
        self._keepers: list[Connection] = []
        self._addresses: list[str] = []
        self._teams: dict[int, str] = {}
        self._count = 0
        self._rendezvous: list[Rendezvous] = []
        self._own_address = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._listener: Listener | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the keepers end, and with them every worker."""
        for connection in self._keepers:
            connection.close()
        if self._listener is not None:
            self._listener.close()
        for rendezvous in self._rendezvous:
            rendezvous.close()
        for process in filter(None, (self._launcher, self._own_keeper)):
            _end(process)
        self._log.close()

    def listen(self, address: str) -> int:
        """Open the port that keepers connect to, and return it."""
        # accept() has no timeout of its own; a keeper that dies early must not hang the driver.
        self._listener = Listener((address, 0), backlog=self.size, authkey=self.key)
        listening = cast(Any, self._listener)._listener._socket
        listening.settimeout(POLL_S)
        # Connections inherit this: a stranger that says nothing must not hold up the keepers.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_S, 0))
        port: int = self._listener.address[1]
        return port

    def launch(self, hosts: str | None = None, options: Sequence[str] = ()) -> None:
        """Start the keepers by horovodrun, and wait for them.

        Args:
            hosts: As for ``horovodrun -H``; None for this host.
            options: Further ones for horovodrun.

        Raises:
            HvdkitError: horovodrun failed, or took longer than two minutes.
        """
        address = "127.0.0.1" if hosts is None else _find_own_address(hosts)
        port = self.listen("127.0.0.1" if address == "127.0.0.1" else "")
        command = [sys.executable, "-m", "horovod.runner.launch", "-np", str(self.size)]
        command += [f"--{self._controller}", *options, *(["-H", hosts] if hosts else [])]
        command += [sys.executable, "-m", "hvdkit.bench.keeper", "--driver", f"{address}:{port}"]
        self._launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**_extend_path(), KEY_VARIABLE: self.key.hex()},
            start_new_session=True,
        )
        self.assemble(address)

    def start_own_keeper(self, address: str, port: int) -> None:
        """Start the keeper of this rank's slot in a job, whose other ranks are keepers."""
        self._own_keeper = subprocess.Popen(
            [sys.executable, "-m", "hvdkit.bench.keeper", "--driver", f"{address}:{port}"],
            stdin=subprocess.DEVNULL,
            env={**os.environ, KEY_VARIABLE: self.key.hex()},
        )

    def assemble(self, address: str) -> None:
        """Wait until every keeper has connected.

        Args:
            address: Of this host, as the keepers see it.

        Raises:
            HvdkitError: They were not there in two minutes, or what starts them ended.
        """
        found: dict[int, tuple[Connection, str, str]] = {}
        try:
            self._accept(found)
        except BaseException:
            # They would wait for this driver, and ``__exit__`` for them.
            for connection, _, _ in found.values():
                connection.close()
            raise
        for rank in range(self.size):
            connection, host, peer = found[rank]
            self._keepers.append(connection)
            self.hosts.append(host)
            # Other hosts cannot use the address by which a keeper of this host came.
            self._addresses.append(address if peer.startswith("127.") else peer)
        self._own_address = address

    def _accept(self, found: dict[int, tuple[Connection, str, str]]) -> None:
        """Fill in each rank's connection, the name of its host, and the address it came from."""
        assert self._listener is not None
        end_s = time.monotonic() + ASSEMBLE_S
        while len(found) < self.size:
            try:
                connection = cast(Connection, self._listener.accept())
            except TimeoutError:
                if self._launcher is not None and self._launcher.poll() is not None:
                    raise self._explain("ended before all workers' keepers were there") from None
                if self._own_keeper is not None and self._own_keeper.poll() is not None:
                    raise self._explain("lost the keeper of rank 0") from None
                if time.monotonic() > end_s:
                    raise self._explain(
                        f"{len(found)} of {self.size} workers' keepers were there after "
                        f"{ASSEMBLE_S} s"
                    ) from None
                continue
            except (OSError, EOFError, AuthenticationError):
                continue  # not a keeper: it had no key
            peer = cast(Any, self._listener).last_accepted[0]
            try:
                hello = receive(connection)
            except (OSError, EOFError):
                continue  # it died; who started it says so
            if hello["rank"] in found:
                raise HvdkitError(f"two keepers say that they have rank {hello['rank']}")
            found[hello["rank"]] = (connection, hello["host"], peer)

    def start(
        self,
        title: str,
        module: str,
        task: Mapping[str, Any],
        *,
        size: int,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> Team:
        """Start workers in the first ``size`` slots; ``Team.wait_until_ready`` says when they are.

        Args:
            title: What the team is, for messages.
            module: What a worker runs; it calls ``hvdkit.bench.worker.serve``.
            task: What the workers are told, as JSON.
            size: Number of workers.
            threads: Compute threads of each.
            environment: Further variables.
        """
        self._count += 1
        team, number = Team(self, self._count, title, size), self._count
        self._teams[number] = title
        addresses = ",".join(self._reserve_ports(number, size))
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT_S),
            # No file: what was saved before must not decide on what is measured.
            "HVDKIT_SETTINGS": f"{os.devnull}/none",
            **(environment or {}),
        }
        places = self._describe_places(size)
        for rank, place in enumerate(places):
            arguments = [module, "--addresses", addresses, "--task", json.dumps(task)]
            message = {"team": number, "do": "start", "arguments": arguments}
            self.send(rank, {**message, "environment": {**variables, **place}})
        return team

    def send(self, keeper: int, message: dict[str, Any]) -> None:
        """Send a message to one keeper."""
        try:
            send(self._keepers[keeper], message)
        except (OSError, EOFError):
            raise self._explain(f"lost the keeper of rank {keeper}") from None

    def receive(self, team: int, keepers: list[int], deadline_s: float) -> tuple[int, Any]:
        """Return the keeper and the answer that comes next for ``team`` from one of ``keepers``.

        Raises:
            HvdkitError: A worker died, of this team or of another that is not forgotten.
            TimeoutError: No answer came until ``deadline_s`` on the monotonic clock.
        """
        ranks = {self._keepers[keeper]: keeper for keeper in keepers}
        while True:
            ready = wait(list(ranks), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise TimeoutError
            connection = cast(Connection, ready[0])
            rank = ranks[connection]
            try:
                message = receive(connection)
            except EOFError:
                raise self._explain(f"lost the keeper of rank {rank}") from None
            if message["team"] not in self._teams:
                continue
            if "died" in message:
                raise HvdkitError(
                    f"{self._teams[message['team']]}: rank {rank} ended with status "
                    f"{message['died']}; its last lines were:\n{message['last_lines']}"
                )
            return rank, message["answer"]

    def forget(self, team: int) -> None:
        """Take no further interest in a team: its workers may end."""
        del self._teams[team]

    def _reserve_ports(self, team: int, size: int) -> list[str]:
        """Return an address with a free port on the host of each rank."""
        for rank in range(size):
            self.send(rank, {"team": team, "do": "port"})
        ports: dict[int, int] = {}
        while len(ports) < size:
            missing = [rank for rank in range(size) if rank not in ports]
            rank, port = self.receive(team, missing, time.monotonic() + ASSEMBLE_S)
            ports[rank] = port
        return [f"{self._addresses[rank]}:{ports[rank]}" for rank in range(size)]

    def _describe_places(self, size: int) -> list[dict[str, str]]:
        """Return the variables by which each worker finds its rank, and Horovod the others."""
        if self._controller == "mpi":
            return [{"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}] * size
        rendezvous = Rendezvous()
        self._rendezvous.append(rendezvous)
        return rendezvous.assign(self.hosts[:size], [self._own_address] * size)

    def _explain(self, what: str) -> HvdkitError:
        if self._launcher is None:
            return HvdkitError(f"the benchmark {what}")
        # The connection ends before the launcher has passed on why.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(LAST_WORDS_S)
        self._log.seek(0)
        log = self._log.read().decode("utf-8", "replace").strip().splitlines()
        tail = "\n".join(log[-30:])
        return HvdkitError(f"horovodrun {what}; its last lines were:\n{tail}")


def _extend_path() -> dict[str, str]:
    # A source checkout that is not installed must still be found by the workers.
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is about to end; insist where it does not."""
    for insist in (process.terminate, process.kill):
        try:
            process.wait(SHUTDOWN_S)
            return
        except subprocess.TimeoutExpired:
            insist()
    process.wait()


def _find_own_address(hosts: str) -> str:
    """Return the address of this host on the way to the first of the others."""
    names = [entry.strip().partition(":")[0] for entry in hosts.split(",")]
    for name in names:
        if name in ("localhost", socket.gethostname()):
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((name, 9))  # sends nothing
            except OSError as error:
                raise HvdkitError(
                    f"cannot reach {name}: {error.strerror}; name hosts as this host resolves them"
                ) from None
            address: str = probe.getsockname()[0]
        if not address.startswith("127."):  # else another name of this host
            return address
    return "127.0.0.1"
