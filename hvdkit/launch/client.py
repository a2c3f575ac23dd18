"""How a rank finds its job's rendezvous server, and what it is told there."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import time
from collections.abc import Iterable

from hvdkit.errors import HvdkitError
from hvdkit.launch.arrangement import Arrival
from hvdkit.launch.job import LOOPBACK, Job
from hvdkit.launch.nodes import find_address
from hvdkit.launch.server import GATHERING, title

__all__ = ["join"]

POLL_S = 0.2
EACH_S = 0.005  # a rank: the server answers some hundred requests a second
ANSWER_S = 3.0
LARGEST = 1 << 16


def join(job: Job, timeout_s: float, own_port: int | None = None) -> dict[str, str]:
    """Meet the other ranks at the server; return this rank's variables.

    Args:
        job: The job.
        timeout_s: How long to look for the server. How long it waits for all ranks is its own
            affair.
        own_port: On rank 0, where the server listens.

    Raises:
        HvdkitError: The server was not found, or has an error for all ranks.
    """
    search = _Search(job, own_port)
    end_s = time.monotonic() + timeout_s
    while True:
        for host, port in search.list_servers():
            answer = search.ask(host, port)
            if answer is None:
                continue
            if "error" in answer:
                raise HvdkitError(f"rank {job.rank}: {answer['error']}")
            return {str(name): str(value) for name, value in answer["variables"].items()}
        if time.monotonic() > end_s:
            raise HvdkitError(search.explain(timeout_s))
        time.sleep(POLL_S)


class _Search:
    """The servers that were asked, and what each said last."""

    def __init__(self, job: Job, own_port: int | None) -> None:
        self._job = job
        self._own_port = own_port
        self._hosts = job.hosts
        if job.kind == "Slurm" and own_port is None:
            self._hosts = tuple(map(find_address, job.hosts))
        self._name = f"{job.rank}.{secrets.token_hex(8)}"
        self._found: dict[tuple[str, int], str] = {}
        self._arrived = False

    def list_servers(self) -> Iterable[tuple[str, int]]:
        """Yield where the server can be."""
        if self._own_port is not None:
            return [(LOOPBACK, self._own_port)]
        board = self._job.board
        if board is not None:
            word = board.read()
            if word is None:
                return []
            told = json.loads(word)
            return [(host, told["port"]) for host in told["hosts"]]
        return [(host, port) for port in self._job.ports for host in self._hosts]

    def ask(self, host: str, port: int) -> dict | None:
        """Return the answer of the job's server, once it has one; None if none is there."""
        job = self._job
        try:
            state, address = self._request(host, port, "GET", f"/{title(job, 'state')}/now")
            if state is None:
                self._found[host, port] = "serves another job"
                return None
            if state != GATHERING and not self._arrived:
                self._found[host, port] = "serves this job, which began or failed without this rank"
                return None
            if state == GATHERING:
                arrival = Arrival.of_this_process(job.rank, job.size, address).to_text()
                self._request(host, port, "PUT", f"/{title(job, 'arrivals')}/{self._name}", arrival)
                # From now on it counts, even if a later question is lost on the way.
                self._arrived = True
            while state == GATHERING:
                time.sleep(max(POLL_S, job.size * EACH_S))
                state, _ = self._request(host, port, "GET", f"/{title(job, 'state')}/now")
            answer, _ = self._request(host, port, "GET", f"/{title(job, 'answers')}/{self._name}")
            if answer is not None:
                return dict(json.loads(answer))
            self._found[host, port] = "served this job, which began or failed without this rank"
        except socket.gaierror as error:
            self._found[host, port] = f"its name does not resolve here ({error.strerror})"
        except TimeoutError:
            self._found[host, port] = "no answer; does a firewall keep this host from it?"
        except ConnectionRefusedError:
            self._found[host, port] = "nothing listens there"
        except (OSError, http.client.HTTPException) as error:
            self._found[host, port] = f"{type(error).__name__}: {error}"
        return None

    def explain(self, timeout_s: float) -> str:
        """Return the error of a rank that found no server."""
        said: dict[tuple[str, str], list[str]] = {}
        for (host, port), text in self._found.items():
            said.setdefault((host, text), []).append(str(port))
        places = "; ".join(
            f"{host}, port {', '.join(ports)}: {text}" for (host, text), ports in said.items()
        )
        board = self._job.board
        if board is not None and not places:
            places = f"rank 0 wrote no {board.path}, which all hosts must see"
        return (
            f"rank {self._job.rank} on {socket.gethostname()} did not find the rendezvous server "
            f"of rank 0 within {timeout_s:g} s. {places}. Has rank 0 started, and what does its "
            "output say? If its host cannot be found so, name it: --rendezvous HOST:PORT"
        )

    @staticmethod
    def _request(
        host: str, port: int, method: str, path: str, text: str | None = None
    ) -> tuple[str | None, str]:
        """Return the body, None unless the status is 200, and the address that answered.

        No proxy comes between, as one does in urllib when a variable names it.
        """
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.connect()
            address = connection.sock.getpeername()[0]
            connection.request(method, path, text)
            response = connection.getresponse()
            body = response.read(LARGEST).decode("utf-8", "replace")
            return (body if response.status == 200 else None), address
