"""A benchmark's worker: one rank of one candidate, which answers what its driver asks.

A keeper (``hvdkit.bench.keeper``) starts it; not meant to be run by hand.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hvdkit.bench.keeper import receive, send
from hvdkit.bench.timing import read_peak_rss_bytes
from hvdkit.env import place

__all__ = ["Seat", "read_arguments", "serve"]

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Seat:
    """Where a worker runs.

    Attributes:
        rank: Among the workers of its team.
        size: Of the team.
        local_rank: Among those of this host.
        addresses: Of a free port on the host of each rank, as ADDRESS:PORT.
    """

    rank: int
    size: int
    local_rank: int
    addresses: tuple[str, ...]


def read_arguments(description: str | None) -> tuple[Connection, Seat, dict[str, Any]]:
    """Return the channel to the driver, this worker's place, and what it shall do."""
    # A keeper that is killed has no time to end its workers.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--channel", type=int, required=True, help="file descriptor")
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--task", type=json.loads, required=True, help="JSON")
    arguments = parser.parse_args()
    channel = Connection(arguments.channel)
    if channel.poll():
        raise SystemExit("the keeper went away")  # before it could have been told to take us along
    here = place()
    addresses = tuple(arguments.addresses.split(","))
    seat = Seat(here.rank, here.size, here.local_rank, addresses)
    return channel, seat, arguments.task


def serve(channel: Connection, hello: Mapping[str, Any], answer: Callable[[Any], Any]) -> None:
    """Say what was prepared, and answer until the driver has no more requests.

    Args:
        channel: As ``read_arguments`` returned it.
        hello: What the driver wants to know, beside the memory of the process and the machine.
        answer: Called with each request, on all ranks in the same order. JSON both ways.
    """
    memory = {"peak_rss_bytes": read_peak_rss_bytes(), "available_bytes": _read_available_bytes()}
    send(channel, {**memory, **hello})
    try:
        while (request := receive(channel)) is not None:
            send(channel, answer(request))
    except EOFError:
        raise SystemExit("the benchmark's driver went away") from None
    send(channel, read_peak_rss_bytes())


def _read_available_bytes() -> int:
    """Return what new processes could take, files that are only cached included."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line; benchmarks need Linux")
