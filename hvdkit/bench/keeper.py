"""A keeper: the process in each slot of a benchmark that starts, feeds, suspends and ends workers.

It sleeps while a worker computes, and it knows no framework. Workers of every candidate live
under the same keepers, on whichever host these are; when the driver or its host goes away, the
keeper ends them all.

``hvdkit.bench.crew`` starts keepers; not meant to be run by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, cast

from hvdkit.env import place
from hvdkit.errors import HvdkitError

__all__ = ["KEY_VARIABLE", "keep", "receive", "send"]

LAST_LINES = 30
END_S = 10
KEY_VARIABLE = "HVDKIT_BENCH_KEY"


def send(connection: Connection, message: Any) -> None:
    """Send what JSON can say: nothing that is received is run as code.

    Raises EOFError when the other side is gone.
    """
    try:
        connection.send_bytes(json.dumps(message).encode())
    except ConnectionError:
        raise EOFError from None


def receive(connection: Connection) -> Any:
    """Return what ``send`` sent; raises EOFError when the other side is gone."""
    try:
        return json.loads(connection.recv_bytes())
    except ConnectionError:
        raise EOFError from None


class _Worker:
    """A worker and the pipe to it; its process group holds what it starts itself."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path):
        self.channel, theirs = Pipe()
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments, "--channel", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self, patience_s: float = 0) -> int:
        """Let the worker end by itself for a while, then kill its process group."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self.signal(signal.SIGKILL)
        self.channel.close()
        return self._process.wait()

    def read_last_lines(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(lines[-LAST_LINES:])


def keep(driver: Connection, rank: int) -> None:
    """Do what the driver says until it is gone; leave no worker behind.

    Args:
        driver: The connection to it.
        rank: Of this keeper among all.
    """
    workers: dict[int, _Worker] = {}
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-bench-"))
    try:
        send(driver, {"rank": rank, "host": socket.gethostname()})
        while True:
            channels = {worker.channel: team for team, worker in workers.items()}
            for ready in cast("list[Connection]", wait([driver, *channels])):
                if ready is driver:
                    _obey(driver, receive(driver), workers, folder)
                elif channels[ready] in workers:
                    _pass_on(driver, channels[ready], workers)
    except EOFError:
        pass  # the driver has what it wanted, or is dead
    finally:
        for worker in workers.values():
            worker.end()
        shutil.rmtree(folder, ignore_errors=True)


def _obey(
    driver: Connection, message: dict[str, Any], workers: dict[int, _Worker], folder: Path
) -> None:
    team = message["team"]
    worker = workers.get(team)
    if message["do"] == "port":
        send(driver, {"team": team, "answer": _find_port()})
    elif message["do"] == "start":
        log = folder / f"{team}.log"
        workers[team] = _Worker(message["arguments"], message["environment"], log)
    elif worker is None:
        return  # it died, and the driver has been told
    elif message["do"] == "ask":
        worker.signal(signal.SIGCONT)
        with contextlib.suppress(EOFError):  # a dead worker is told of by its channel
            send(worker.channel, message["request"])
    elif message["do"] == "pause":
        worker.signal(signal.SIGSTOP)
    elif message["do"] == "end":
        del workers[team]
        worker.end(patience_s=END_S)


def _pass_on(driver: Connection, team: int, workers: dict[int, _Worker]) -> None:
    """Tell the driver what a worker says, or that it died and what it said last."""
    worker = workers[team]
    try:
        answer = {"team": team, "answer": receive(worker.channel)}
    except EOFError:
        del workers[team]
        status = worker.end(patience_s=END_S)
        answer = {"team": team, "died": status, "last_lines": worker.read_last_lines()}
    send(driver, answer)


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Connect to the driver that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", required=True, help="ADDRESS:PORT")
    # horovodrun's way to end it: its workers and its folder must go first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    address, _, port = parser.parse_args().driver.rpartition(":")
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    try:
        with Client((address, int(port)), authkey=key) as driver:
            keep(driver, place().rank)
    except (OSError, EOFError, AuthenticationError, HvdkitError) as error:
        raise SystemExit(f"cannot serve the benchmark's driver at {address}: {error}") from None


if __name__ == "__main__":
    main()
