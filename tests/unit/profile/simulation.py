"""Training steps and all-reduces, simulated event by event: what a scaling model is tested on.

Nothing here is the model's formula. Layers differ in size and time, buckets are filled as hvdkit
fills them, every hop of every ring is followed by itself, delays are drawn, and a transfer takes
processor time from the computation while it runs.
"""

import random
from dataclasses import dataclass

from hvdkit.buckets import plan_buckets
from hvdkit.results.files import make_result, make_series

TICK_S = 1e-4


@dataclass(frozen=True)
class Cluster:
    """What is simulated; seconds, bytes, and counts."""

    cores: int = 4
    per_host: int = 64
    forward_s: float = 0.010
    layers: tuple[tuple[float, int], ...] = (
        (0.006, 2_000_000),
        (0.004, 9_000_000),
        (0.003, 500_000),
        (0.005, 4_000_000),
        (0.002, 6_000_000),
    )
    bucket_bytes: int = 4 << 20
    latency_s: float = 20e-6
    bandwidth: float = 2e9
    network_latency_s: float = 40e-6
    network_bandwidth: float = 1e9
    steal: float = 0.3
    noise: float = 0.03
    batch: int = 32

    @property
    def parameters(self):
        return sum(size for _, size in self.layers) // 4


def ring_s(cluster, workers, size_bytes, rng):
    """Follow the pieces of a message round the ring; return when the last rank has all of them."""
    turns = max(1.0, workers / cluster.cores) if workers <= cluster.per_host else 1.0
    piece_s, free_s = [0.0] * workers, [0.0] * workers  # when each has the piece, each link is free
    for _ in range(2 * (workers - 1)):
        arrived = []
        for rank in range(workers):
            before = (rank - 1) % workers
            crosses = before // cluster.per_host != rank // cluster.per_host
            latency_s = cluster.network_latency_s if crosses else cluster.latency_s
            bandwidth = cluster.network_bandwidth if crosses else cluster.bandwidth
            sent_s = max(piece_s[before], free_s[rank]) + turns * size_bytes / workers / bandwidth
            free_s[rank] = sent_s
            arrived.append(sent_s + turns * latency_s * rng.uniform(0.9, 1.1))
        piece_s = arrived
    return max(piece_s)


def step_s(cluster, workers, samples, rng, reduce=True):
    """Return one step's seconds of each rank."""
    scale = samples / cluster.batch
    # Delays with a long tail, as on real machines; the mean is 1.
    delays = [1 + cluster.noise * (rng.gammavariate(4, 0.5) - 2) for _ in range(workers)]
    total_s = scale * (cluster.forward_s + sum(t for t, _ in cluster.layers))
    local = min(workers, cluster.per_host)
    rate = min(1.0, cluster.cores / local)
    if not reduce or workers == 1:
        return [total_s * delay / rate for delay in delays]
    ready_at, elapsed_s = [], cluster.forward_s
    for seconds, _ in reversed(cluster.layers):
        elapsed_s += seconds
        ready_at.append(elapsed_s * scale)
    sizes = [size for _, size in reversed(cluster.layers)]
    plan = plan_buckets(sizes, [0] * len(sizes), bucket_bytes=cluster.bucket_bytes)
    waiting = [(max(ready_at[i] for i in one), sum(sizes[i] for i in one)) for one in plan]
    done_s, ends_s, busy_until, now = [0.0] * workers, [0.0] * workers, 0.0, 0.0
    while waiting or now < busy_until or not all(ends_s):
        busy = now < busy_until
        if not busy and waiting:
            at, size = waiting[0]
            if all(done_s[r] >= at * delays[r] for r in range(workers)):
                waiting.pop(0)
                busy_until = now + ring_s(cluster, workers, size, rng)
                busy = True
        now += TICK_S
        for rank in range(workers):
            done_s[rank] += TICK_S * rate * (1 - cluster.steal * busy)
            if not ends_s[rank] and done_s[rank] >= total_s * delays[rank]:
                ends_s[rank] = now
    return [max(now, busy_until)] * workers


def train(cluster, counts, *, rounds=6, steps=6, strong=False, seed=1, candidates=None, **labels):
    """Return a result of driver ``train`` with candidates hvdkit and single."""
    rng = random.Random(seed)
    series = []
    for workers in counts:
        samples = cluster.batch // workers if strong else cluster.batch
        for candidate in candidates or ("hvdkit", "single"):
            ranks = []
            for _ in range(rounds):
                taken = [
                    step_s(cluster, workers, samples, rng, candidate == "hvdkit")
                    for _ in range(steps)
                ]
                ranks.append([list(rank) for rank in zip(*taken, strict=True)])
            names = {
                "framework": "torch",
                "model": "layers",
                "candidate": candidate,
                "workers": workers,
                "threads": 1,
                "scaling": "strong" if strong else "weak",
                "batch": samples,
                "global_batch": samples * workers,
                "parameters": cluster.parameters,
                "tensors": len(cluster.layers),
                "dtype": "float32",
                "input": "synthetic",
                "accumulate": 1,
                "compression": "none",
                "bucket_size_mb": cluster.bucket_bytes / (1 << 20),
                "controller": "gloo",
            }
            series.append(make_series("step_s", "s", ranks, lower_is_better=True, **names | labels))
    return make_result("train", {}, series, {"hosts": ["here"]}, machine(cluster))


def allreduce(cluster, counts, *, rounds=6, seed=2, hosts=1):
    """Return a result of driver ``allreduce``."""
    rng = random.Random(seed)
    series = [
        make_series(
            "allreduce_s",
            "s",
            [[[ring_s(cluster, workers, size, rng)] * 3] * workers for _ in range(rounds)],
            lower_is_better=True,
            candidate="hvdkit",
            dtype="float32",
            size_bytes=size,
            tensors=1,
            workers=workers,
            threads=1,
            controller="gloo",
        )
        for workers in counts
        for size in (1 << 12, 1 << 18, 1 << 22, 1 << 25)
    ]
    names = [f"host{index}" for index in range(hosts)]
    return make_result("allreduce", {}, series, {"hosts": names}, machine(cluster))


def machine(cluster, **changes):
    """Return a fingerprint."""
    return {
        "processor": "simulated",
        "cores": cluster.cores,
        "load": 0.0,
        "memory_bytes": 1 << 30,
        "system": "Linux",
        "python": "3.11.0",
        "versions": {"hvdkit": "0", "torch": "2"},
        **changes,
    }
