"""Horovod's rendezvous for a team of workers, without horovodrun in front of each."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["Rendezvous"]


class Rendezvous:
    """The server by which workers find each other under Gloo; ``close`` ends it.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, ports: Sequence[int] | None = None, address: str = "") -> None:
        """Start it.

        Args:
            ports: The first of these that is free; default any.
            address: Of this host, to listen on with one of ``ports``; default all of them.

        Raises:
            OSError: None of ``ports`` is free.
        """
        # Horovod is loaded here, so that the command line does not wait for it.
        http = importlib.import_module("horovod.runner.http.http_server")
        self._server: Any = http.RendezvousServer()
        if ports is None:
            self.port: int = self._server.start()
            return
        for port in ports:
            try:
                httpd = http.RendezvousHTTPServer((address, port), http.RendezvousHandler, False)
            except OSError as error:
                taken = error
                continue
            threads = importlib.import_module("horovod.runner.util.threads")
            self._server._httpd = httpd
            self._server._listen_thread = threads.in_thread(httpd.serve_forever)
            self.port = port
            return
        raise taken

    def write(self, scope: str, key: str, text: str) -> None:
        """Leave word for whoever asks with ``GET /scope/key``."""
        with self._server._httpd.cache_lock:
            self._server._httpd.cache.setdefault(scope, {})[key] = text.encode()

    def read(self, scope: str) -> dict[str, str]:
        """Return what has been left in a scope, with ``PUT /scope/key`` too."""
        with self._server._httpd.cache_lock:
            found = dict(self._server._httpd.cache.get(scope, {}))
        return {key: value.decode("utf-8", "replace") for key, value in found.items()}

    def assign(self, hosts: Sequence[str], addresses: Sequence[str]) -> list[dict[str, str]]:
        """Begin a job; return the variables of each rank.

        Args:
            hosts: The host of each rank; ranks of one host need not be neighbours.
            addresses: By which each rank reaches this server.
        """
        slots = _assign_slots(hosts)
        # As init() does, which would also forget what was left.
        self._server._httpd._extract_scope_size(slots)
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
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            }
            for slot, address in zip(slots, addresses, strict=True)
        ]

    def close(self) -> None:
        """End the server."""
        self._server.stop()
        self._server._httpd.server_close()


def _assign_slots(hosts: Sequence[str]) -> list[Any]:
    """Number ranks within their host, and across the hosts that have as many."""
    slots = importlib.import_module("horovod.runner.common.util.hosts")
    sizes = Counter(hosts)
    # Ranks are numbered across the hosts that have as many.
    peers = {
        local_rank: {host: n for n, host in enumerate(h for h in sizes if sizes[h] > local_rank)}
        for local_rank in range(max(sizes.values()))
    }
    seen: Counter[str] = Counter()
    places = []
    for rank, host in enumerate(hosts):
        local_rank = seen[host]
        seen[host] += 1
        places.append(
            slots.SlotInfo(
                hostname=host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=peers[local_rank][host],
                size=len(hosts),
                local_size=sizes[host],
                cross_size=len(peers[local_rank]),
            )
        )
    return places
