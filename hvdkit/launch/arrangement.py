"""Who is there, and what each rank is told when all are."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdkit.errors import HvdkitError

__all__ = ["Arrival", "check_arrivals", "choose_addresses", "describe_missing", "name_hosts"]

SHOWN = 8


@dataclass(frozen=True)
class Arrival:
    """A process that has reached the server.

    Attributes:
        rank: Its number.
        size: The number of processes, as it knows it.
        host: Its host's name.
        machine: What tells hosts of the same name apart.
        pid: Of the process, for messages.
        address: By which it reached the server.
    """

    rank: int
    size: int
    host: str
    machine: str
    pid: int
    address: str

    @staticmethod
    def of_this_process(rank: int, size: int, address: str) -> Arrival:
        """Return that of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.readlink("/proc/self/ns/net")  # containers may share the rest
        return Arrival(rank, size, socket.gethostname(), f"{boot} {network}", os.getpid(), address)

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Arrival:
        """Return what ``to_text`` made.

        Raises:
            TypeError, ValueError: It was not.
        """
        arrival = Arrival(**json.loads(text))
        ipaddress.ip_address(arrival.address)
        return arrival


def check_arrivals(arrivals: Collection[Arrival], size: int) -> list[Arrival] | None:
    """Return the arrivals by rank when all are there, None before.

    Raises:
        HvdkitError: Two are the same rank, or do not agree on the size.
    """
    by_rank: dict[int, Arrival] = {}
    for one in arrivals:
        if one.size != size:
            raise HvdkitError(
                f"rank {one.rank} (process {one.pid} on {one.host}) says that the job has "
                f"{one.size} workers, rank 0 that it has {size}. Start all with the same number"
            )
        other = by_rank.setdefault(one.rank, one)
        if other is not one:
            raise HvdkitError(
                f"two processes say that they are rank {one.rank}: {other.pid} on {other.host} and "
                f"{one.pid} on {one.host}. Was the rank set by hand, or a process restarted?"
            )
    return [by_rank[rank] for rank in range(size)] if len(by_rank) == size else None


def describe_missing(arrivals: Collection[Arrival], size: int, timeout_s: float) -> str:
    """Return the error of a job whose ranks did not all come."""
    there = {one.rank: one.host for one in arrivals}
    missing = [str(rank) for rank in range(size) if rank not in there]
    present = [f"{rank} ({host})" for rank, host in sorted(there.items())]
    return (
        f"rank{'s' if len(missing) > 1 else ''} {_shorten(missing)} of {size} did not come within "
        f"{timeout_s:g} s; there: {_shorten(present)}. The output of those that are missing says "
        "why, if they have started; --timeout S waits longer for them"
    )


def name_hosts(arrivals: Sequence[Arrival]) -> list[str]:
    """Return the name of each one's host; two hosts of one name get different ones."""
    machines: dict[str, list[str]] = {}
    for one in arrivals:
        known = machines.setdefault(one.host, [])
        if one.machine not in known:
            known.append(one.machine)
    numbers = [machines[one.host].index(one.machine) for one in arrivals]
    return [
        f"{one.host}-{number + 1}" if number else one.host
        for one, number in zip(arrivals, numbers, strict=True)
    ]


def choose_addresses(arrivals: Sequence[Arrival], hosts: Sequence[str]) -> list[str]:
    """Return the address of the server for each rank: that by which it came.

    Workers take the way to it for the way to each other. So those of rank 0's host are given the
    address that most ranks of other hosts use; all of one host are given loopback.
    """
    if len(set(hosts)) == 1:
        return ["127.0.0.1"] * len(arrivals)
    served = hosts[0]
    outer = Counter(
        one.address
        for one, host in zip(arrivals, hosts, strict=True)
        if host != served and not _is_loopback(one.address)
    )
    if not outer:
        return [one.address for one in arrivals]
    common = outer.most_common(1)[0][0]
    return [
        common if host == served else one.address for one, host in zip(arrivals, hosts, strict=True)
    ]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _shorten(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
