"""The rendezvous server of a job, beside its rank 0 and in a process of its own.

It outlives rank 0 by a moment, since the ranks that are left ask it who is lost
(``hvdkit/install/lost_ranks.h``), and then ends by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.launch.arrangement import (
    Arrival,
    check_arrivals,
    choose_addresses,
    describe_missing,
    name_hosts,
)
from hvdkit.launch.job import LOOPBACK, Job
from hvdkit.launch.rendezvous import Rendezvous

__all__ = ["GATHERING", "gather", "start_server", "title"]

GATHERING = "gathering"
OVER = "over"  # all were there, or it failed
POLL_S = 0.1
LINGER_S = 5.0
# How long the port of another job that has just ended may stay taken.
TAKEN_S = 10.0
_REPORT = 3  # file descriptor


def title(job: Job, part: str) -> str:
    """Return the scope in the server's store where a part of the job's meeting is."""
    return f"hvdkit-{job.key}-{part}"


def start_server(job: Job, timeout_s: float) -> int:
    """Start the server; return its port. It watches this process, whatever that executes next.

    Args:
        job: The job of which this is rank 0.
        timeout_s: How long the server waits for all ranks.

    Raises:
        HvdkitError: It could not start.
    """
    watched = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # A grandchild: the command that this process becomes has no child that it does not know.
        if os.fork() == 0:
            _run_apart(job, timeout_s, watched, writing)
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, encoding="utf-8") as report:
        text = report.read()
    try:
        return int(text)
    except ValueError:
        raise HvdkitError(text.strip() or "the rendezvous server died at its start") from None


def gather(
    rendezvous: Rendezvous, job: Job, timeout_s: float, is_wanted: Callable[[], bool]
) -> bool:
    """Wait for all ranks and tell each its variables, or all the same error.

    Args:
        rendezvous: The server.
        job: The job.
        timeout_s: How long to wait.
        is_wanted: Whether to go on waiting.

    Returns:
        Whether the ranks were told something.
    """
    end_s = time.monotonic() + timeout_s
    rendezvous.write(title(job, "state"), "now", GATHERING)
    while is_wanted():
        entries = rendezvous.read(title(job, "arrivals"))
        try:
            arrivals = {name: Arrival.from_text(text) for name, text in entries.items()}
            ranked = check_arrivals(arrivals.values(), job.size)
            if ranked is None and time.monotonic() > end_s:
                raise HvdkitError(describe_missing(arrivals.values(), job.size, timeout_s))
        except (HvdkitError, ValueError, TypeError) as error:
            answers: dict[str, Any] = {name: {"error": str(error)} for name in entries}
        else:
            if ranked is None:
                time.sleep(POLL_S)
                continue
            hosts = name_hosts(ranked)
            places = rendezvous.assign(hosts, choose_addresses(ranked, hosts))
            answers = {name: {"variables": places[one.rank]} for name, one in arrivals.items()}
        for name, answer in answers.items():
            rendezvous.write(title(job, "answers"), name, json.dumps(answer))
        rendezvous.write(title(job, "state"), "now", OVER)
        return True
    return False


def _run_apart(job: Job, timeout_s: float, watched: int, report: int) -> None:
    """Serve; never returns. Nothing that the launcher gave to rank 0 stays open."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        os.dup2(report, _REPORT)
        # Not up to SC_OPEN_MAX, which may be 2^30.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        os.closerange(_REPORT + 1, highest + 1)
        ended = _heed_signals()
        try:
            rendezvous = _listen(job)
            _leave_word(job, rendezvous.port)
        except Exception as error:
            os.write(_REPORT, _explain(job, error).encode())
            os._exit(1)
        os.write(_REPORT, str(rendezvous.port).encode())
        os.close(_REPORT)
        is_there = _watch(watched)
        told = gather(rendezvous, job, timeout_s, is_there)
        if job.board is not None:
            job.board.clear()
        while told and is_there():
            time.sleep(POLL_S)
        end_s = time.monotonic() + LINGER_S
        while told and not ended and time.monotonic() < end_s:
            time.sleep(POLL_S)
    finally:
        os._exit(0)


def _heed_signals() -> list[int]:
    """Leave those for the whole process group to rank 0; return what notes that the job shall end.

    The server goes when rank 0 has gone, at once where both were told to.
    """
    ended: list[int] = []
    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "PIPE", "TSTP", "TTIN", "TTOU"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    return ended


def _listen(job: Job) -> Rendezvous:
    end_s = time.monotonic() + TAKEN_S
    while True:
        try:
            return Rendezvous(job.ports, LOOPBACK if job.hosts == (LOOPBACK,) else "")
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(POLL_S)


def _leave_word(job: Job, port: int) -> None:
    """Tell the others on which addresses this host can be reached, where there is a board."""
    if job.board is None:
        return
    psutil: Any = importlib.import_module("psutil")
    socket: Any = importlib.import_module("socket")
    addresses = [
        one.address
        for interface in psutil.net_if_addrs().values()
        for one in interface
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    job.board.write(json.dumps({"hosts": [socket.gethostname(), *addresses], "port": port}))


def _explain(job: Job, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Horovod cannot be loaded ({error}); run: hvdkit install"
    if isinstance(error, HvdkitError):
        return str(error)
    if isinstance(error, OSError):
        ports = ", ".join(map(str, job.ports))
        return (
            f"the rendezvous server of rank 0 cannot listen on port {ports}: {error}. Name another "
            "one: --rendezvous HOST:PORT"
        )
    return "".join(traceback.format_exception(error))


def _watch(pid: int) -> Callable[[], bool]:
    """Return what says whether a process is still there."""
    psutil: Any = importlib.import_module("psutil")
    process = psutil.Process(pid)  # knows it by the time of its start, too

    def is_there() -> bool:
        try:
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    return is_there
