"""A benchmark inside a job that runs already: its ranks become the slots.

Under horovodrun (Gloo) the ranks find rank 0 through the job's own rendezvous server; under srun
and Open MPI through a file in the cache folder of the home, which clusters share between hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from hvdkit.bench.crew import ASSEMBLE_S, Crew
from hvdkit.bench.keeper import keep
from hvdkit.env import launcher, place
from hvdkit.errors import HvdkitError
from hvdkit.launch.board import FileBoard

__all__ = ["join", "open_board", "run_as_driver"]

POLL_S = 0.2


class Board(Protocol):
    """Where rank 0 leaves word for the others."""

    def write(self, text: str) -> None:
        """Leave word."""

    def read(self) -> str | None:
        """Return it, or None as long as there is none."""

    def clear(self) -> None:
        """Take it away."""


def open_board(environ: Mapping[str, str] | None = None) -> Board | None:
    """Return the board of the job that this process is a rank of; None outside of a job.

    Raises:
        HvdkitError: The job's launcher offers none.
    """
    environ = os.environ if environ is None else environ
    name = launcher(environ)
    if name is None:
        return None
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        address = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        return _ServerBoard(f"http://{address}:{environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}")
    if name == "Slurm":
        return FileBoard(f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}")
    if name == "Open MPI" and "PMIX_NAMESPACE" in environ:
        return FileBoard(f"openmpi-{environ['PMIX_NAMESPACE']}")
    raise HvdkitError(
        f"cannot run inside a job of {name}: start it with horovodrun --gloo, srun or Open MPI's "
        "mpirun, or outside of a job"
    )


def run_as_driver(board: Board) -> Crew:
    """Return the crew of this job, on its rank 0, whose slot has a keeper as well.

    Raises:
        HvdkitError: The other ranks did not come within two minutes.
    """
    here = place()
    crew = Crew(here.size)
    alone = here.local_size == here.size
    address = "127.0.0.1" if alone else socket.gethostname()
    with contextlib.ExitStack() as stack:
        stack.enter_context(crew)
        port = crew.listen("127.0.0.1" if alone else "")
        crew.start_own_keeper("127.0.0.1", port)
        stack.callback(board.clear)
        board.write(json.dumps({"address": address, "port": port, "key": crew.key.hex()}))
        crew.assemble(address)
        board.clear()
        stack.pop_all()  # the caller has it now
    return crew


def join(board: Board) -> None:
    """Be a keeper for rank 0, until it is done.

    Raises:
        HvdkitError: Rank 0 left no word for two minutes, or cannot be reached.
    """
    end_s = time.monotonic() + ASSEMBLE_S
    while (text := board.read()) is None:
        if time.monotonic() > end_s:
            raise HvdkitError(f"rank 0 of this job did not begin within {ASSEMBLE_S} s")
        time.sleep(POLL_S)
    found: dict[str, Any] = json.loads(text)
    try:
        driver = Client((found["address"], found["port"]), authkey=bytes.fromhex(found["key"]))
    except (OSError, EOFError, AuthenticationError) as error:
        raise HvdkitError(
            f"cannot reach rank 0 at {found['address']}:{found['port']}: {error}"
        ) from None
    with driver:
        keep(driver, place().rank)


class _ServerBoard:
    """A key in the store of horovodrun's rendezvous server."""

    def __init__(self, server: str) -> None:
        self._url = f"{server}/hvdkit-bench/driver"
        # A proxy that a variable names cannot reach the job's hosts.
        self._opener = build_opener(ProxyHandler({}))

    def write(self, text: str) -> None:
        self._ask(data=text.encode(), method="PUT")

    def read(self) -> str | None:
        try:
            return self._ask()
        except HTTPError:
            return None

    def clear(self) -> None:
        self._ask(method="DELETE")

    def _ask(self, **options: Any) -> str:
        try:
            with self._opener.open(Request(self._url, **options), timeout=ASSEMBLE_S) as answer:
                text: str = answer.read().decode()
                return text
        except HTTPError:
            raise
        except URLError as error:
            raise HvdkitError(f"horovodrun's rendezvous server is gone: {error.reason}") from None
