"""What an all-reduce costs over latency and bandwidth, within a host and between hosts.

Source: the alpha-beta model and the ring of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH", International Journal of High Performance Computing
Applications 19 (2005): 2 (n - 1) steps, in each of which a rank sends an nth of the message. In
two levels: Horovod's hierarchical all-reduce (HOROVOD_HIERARCHICAL_ALLREDUCE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hvdkit.errors import HvdkitError

__all__ = ["ALGORITHMS", "Algorithm", "Link", "estimate_allreduce_s"]

Algorithm = Literal["ring", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "hierarchical")


@dataclass(frozen=True)
class Link:
    """A way from one worker to the next, or from one host to the next.

    Attributes:
        latency_s: Of one step of a ring, alpha.
        bandwidth_bytes_per_s: In each direction, 1 / beta. Between hosts it is that of a host's
            network adapter, which its workers share.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        """Refuse what no link has."""
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise HvdkitError(f"a latency must be 0 s or more; got {self.latency_s}")
        if not (self.bandwidth_bytes_per_s > 0 and math.isfinite(self.bandwidth_bytes_per_s)):
            raise HvdkitError(
                f"a bandwidth must be above 0 bytes/s; got {self.bandwidth_bytes_per_s}"
            )


def estimate_allreduce_s(
    size_bytes: float,
    workers: int,
    *,
    workers_per_host: int,
    within: Link | None,
    between: Link | None,
    algorithm: Algorithm = "ring",
) -> float:
    """Return the seconds that an all-reduce takes; 0 for one worker.

    ``ring``: one ring through all workers, which enters and leaves each host once. Each link
    carries 2 (n - 1) / n of the message, so the slowest sets the pace; a piece that travels round
    the ring meets the latency of every link on its way.

    ``hierarchical``: reduce-scatter within each host, rings between hosts that each carry a
    worker's share, all-gather within each host. All shares pass through the host's one adapter.

    Args:
        size_bytes: Of the message on each worker.
        workers: Number of ranks, which fill one host after the other.
        workers_per_host: Ranks that a full host has.
        within: From worker to worker of a host; None where a host has one worker.
        between: From host to host; None where there is one host.
        algorithm: A name from ``ALGORITHMS``.

    Raises:
        HvdkitError: The message needs a link that is None.
    """
    if workers == 1:
        return 0.0
    hosts = math.ceil(workers / workers_per_host)
    local = min(workers, workers_per_host)
    within_s = between_s = 0.0
    if local > 1:
        if within is None:
            raise HvdkitError(_say_missing("within a host", local, "workers"))
        within_s = size_bytes / within.bandwidth_bytes_per_s
    if hosts > 1:
        if between is None:
            raise HvdkitError(_say_missing("between hosts", hosts, "hosts"))
        between_s = size_bytes / between.bandwidth_bytes_per_s
    within_latency_s = 0.0 if within is None else within.latency_s
    between_latency_s = 0.0 if between is None else between.latency_s
    if algorithm == "hierarchical":
        local_s = 2 * (local - 1) * within_latency_s + 2 * (local - 1) / local * within_s
        rings_s = 2 * (hosts - 1) * between_latency_s + 2 * (hosts - 1) / hosts * between_s
        return local_s + rings_s
    latency_s = 2 * (workers - hosts) * within_latency_s + 2 * (hosts - 1) * between_latency_s
    return latency_s + 2 * (workers - 1) / workers * max(within_s, between_s)


def _say_missing(where: str, count: int, things: str) -> str:
    options = "--latency-us and --bandwidth-gbit-s"
    if things == "workers":
        options = "--intra-latency-us and --intra-bandwidth-gbytes-s"
    return (
        f"what an all-reduce of {count} {things} costs {where} is neither measured nor given: "
        f"measure it with `hvdkit bench allreduce`, or give {options}"
    )
