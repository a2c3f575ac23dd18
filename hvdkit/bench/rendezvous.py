"""Horovod's rendezvous for a team of workers, without horovodrun in front of each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

__all__ = ["Rendezvous"]


class Rendezvous:
    """The server by which workers find each other under Gloo; ``close`` ends it."""

    def __init__(self, hosts: Sequence[str], address: str) -> None:
        """Start it.

        Args:
            hosts: The host of each rank; ranks of one host need not be neighbours.
            address: Of this host, as the workers see it.
        """
        # Horovod is loaded here, so that the command line does not wait for it.
        http = importlib.import_module("horovod.runner.http.http_server")
        self._server: Any = http.RendezvousServer()
        self._port = self._server.start()
        self._address = address
        self._slots = _assign_slots(hosts)
        self._server.init(self._slots)

    def describe_places(self) -> list[dict[str, str]]:
        """Return the environment variables of each rank."""
        return [
            {
                "HOROVOD_RANK": str(slot.rank),
                "HOROVOD_SIZE": str(slot.size),
                "HOROVOD_LOCAL_RANK": str(slot.local_rank),
                "HOROVOD_LOCAL_SIZE": str(slot.local_size),
                "HOROVOD_CROSS_RANK": str(slot.cross_rank),
                "HOROVOD_CROSS_SIZE": str(slot.cross_size),
                "HOROVOD_HOSTNAME": slot.hostname,
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._port),
            }
            for slot in self._slots
        ]

    def close(self) -> None:
        """End the server."""
        self._server.stop()
        self._server._httpd.server_close()


def _assign_slots(hosts: Sequence[str]) -> list[Any]:
    """Number ranks within their host, and across the hosts that have as many."""
    slots = importlib.import_module("horovod.runner.common.util.hosts")
    names = list(dict.fromkeys(hosts))
    places = []
    for rank, host in enumerate(hosts):
        local_rank = hosts[:rank].count(host)
        peers = [name for name in names if hosts.count(name) > local_rank]
        places.append(
            slots.SlotInfo(
                hostname=host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=peers.index(host),
                size=len(hosts),
                local_size=hosts.count(host),
                cross_size=len(peers),
            )
        )
    return places
