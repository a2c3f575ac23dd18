"""The nodes of a Slurm step."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

from hvdkit.errors import EnvironmentMismatchError

__all__ = ["expand", "find_address", "list_candidates"]

ANSWER_S = 10


def list_candidates(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that rank 0 of this step can be on.

    Slurm counts tasks from the first node of its list on, unless a host file gives the order: that
    is in no variable.

    Raises:
        EnvironmentMismatchError: Slurm did not set the list of nodes.
    """
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(variable):
            nodes = expand(environ[variable])
            arbitrary = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
            return nodes if arbitrary else nodes[:1]
    raise EnvironmentMismatchError(
        "SLURM_STEP_NODELIST is not set, though Slurm set SLURM_PROCID. Was it lost by a wrapper "
        "script? Or name the host of rank 0: --rendezvous HOST"
    )


def expand(nodes: str) -> tuple[str, ...]:
    """Return the names in a list such as "login,n[1-3,07],r[0-1]n[0-3]", in its order.

    Raises:
        EnvironmentMismatchError: It is no such list.
    """
    if not re.fullmatch(r"([^\[\],\s]|\[\d+(-\d+)?(,\d+(-\d+)?)*\]|,(?!,|$))+", nodes):
        raise EnvironmentMismatchError(
            f'{nodes!r} is no list of nodes as Slurm writes it, such as "n[1-3,7]"'
        )
    # A comma within brackets has none of them between itself and the closing one.
    entries = re.split(r",(?![^\[\]]*\])", nodes)
    return tuple(name for entry in entries for name in _expand_entry(entry))


def find_address(node: str) -> str:
    """Return a name or address of a node that this host can resolve; the node's name if none."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", node],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return node
    match = re.search(r"\bNodeAddr=(\S+)", shown)
    return match[1] if match else node


def _expand_entry(entry: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", entry)
    if match is None:
        return [entry]
    names = []
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            middle = str(number).zfill(len(first))
            names += _expand_entry(entry[: match.start()] + middle + entry[match.end() :])
    return names
