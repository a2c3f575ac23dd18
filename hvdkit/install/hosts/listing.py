"""The hosts of a job, written as horovodrun takes them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import HvdkitError

__all__ = ["HostSlots", "parse_hosts", "read_host_file"]

_HOST = re.compile(r"(\w[\w.-]*):([0-9]+)")
_LINE = re.compile(r"(\w[\w.-]*)\s+slots=([0-9]+)")


@dataclass(frozen=True)
class HostSlots:
    """A host, and how many workers it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[HostSlots]:
    """Parse a list as of ``horovodrun -H``, for example "a:4,b:4".

    Raises:
        HvdkitError: An entry is not NAME:SLOTS, takes no worker, or comes twice.
    """
    found = []
    for entry in text.split(","):
        match = _HOST.fullmatch(entry.strip())
        if not match:
            raise HvdkitError(
                f"{entry.strip()!r} is no host of the form NAME:SLOTS; expected a list such as "
                "hosta:4,hostb:4."
            )
        found.append(HostSlots(match[1], int(match[2])))
    return _check(found)


def read_host_file(path: Path) -> list[HostSlots]:
    """Read a file as of ``horovodrun --hostfile``: a line "NAME slots=N" for each host.

    Raises:
        HvdkitError: The file cannot be read, or a line has another form (horovodrun takes neither
            comments nor empty lines), takes no worker, or names a host twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HvdkitError(f"The host file {path} cannot be read: {error}.") from error
    found = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line.rstrip())
        if not match:
            raise HvdkitError(
                f"Line {number} of {path} is {line!r}; expected NAME slots=N, without comments or "
                "empty lines: horovodrun takes none."
            )
        found.append(HostSlots(match[1], int(match[2])))
    if not found:
        raise HvdkitError(f"The host file {path} is empty; expected a line NAME slots=N a host.")
    return _check(found)


def _check(found: Iterable[HostSlots]) -> list[HostSlots]:
    known: dict[str, HostSlots] = {}
    for host in found:
        if host.slots < 1:
            raise HvdkitError(f"{host.name} has {host.slots} slots; expected at least 1.")
        if host.name in known:
            raise HvdkitError(f"{host.name} is listed twice; add its slots up in one entry.")
        known[host.name] = host
    return list(known.values())
