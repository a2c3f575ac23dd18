"""What tests of elastic jobs have in common: starting them, and what must hold at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.system.loopback import HOSTS, ElasticJob, Loopback

__all__ = ["Deaths", "change_hosts", "demand_whole", "starting", "survive"]

# Number of the host, first step of the whole run that it may be in, moment, seconds after that.
Deaths = Sequence[tuple[int, int, str, float]]


@contextmanager
def starting(loopback: Loopback, folder: Path, script: Path) -> Iterator[Callable[..., ElasticJob]]:
    """Give a function that starts jobs, which are ended with the block, whatever becomes of it."""
    jobs: list[ElasticJob] = []

    def start(
        hosts: Sequence[str], sizes: Iterable[int], deaths: Deaths = (), width: int = 16, **env: str
    ) -> ElasticJob:
        doom = [
            {"host": HOSTS[host], "step": step, "moment": moment, "delay_s": delay_s}
            for host, step, moment, delay_s in deaths
        ]
        env |= {
            "HVDKIT_TEST_DOOM": json.dumps(doom),
            "ELASTIC_SIZES": ",".join(map(str, sizes)),
            "ELASTIC_WIDTH": str(width),
        }
        jobs.append(ElasticJob(loopback, folder / f"job{len(jobs)}", script, hosts, env=env))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.end()


def demand_whole(job: ElasticJob, hosts: Iterable[str]) -> dict[str, Any]:
    """Demand that the workers on ``hosts``, and no others, came to the same good end.

    They have checked by then that every sample counted once in each epoch, and that replicas
    are equal.
    """
    done = job.finish()
    assert sorted(done) == sorted(hosts), job.explain(f"a good end on {sorted(done)} only")
    first, *others = done.values()
    assert first["size"] == len(done)
    assert first["epochs"] >= 1
    for other in others:
        for key in ("digest", "sizes", "epochs", "rates"):
            assert other[key] == first[key], job.explain(f"{key} differs")
    return first


def survive(
    start: Callable[..., ElasticJob], jobs: Sequence[tuple[Deaths, dict[str, str]]], width: int
) -> None:
    """Run jobs at the same time, in each of which workers on two of three hosts are killed."""
    running = [
        (start(HOSTS, sizes=[3, 2, 1], deaths=deaths, width=width, **env), deaths)
        for deaths, env in jobs
    ]
    for job, deaths in running:
        survivors = set(HOSTS) - {HOSTS[host] for host, *_ in deaths}
        result = demand_whole(job, survivors)
        assert result["sizes"] == [3, 2, 1]
        demand_rates(result, 0.01)  # scaled for three workers, then with their number


def change_hosts(start: Callable[..., ElasticJob], **env: str) -> ElasticJob:
    """Run a job whose host becomes two, then three, and then two others."""
    job = start(HOSTS[:1], sizes=[1, 2, 3, 2], **env)
    job.wait_for("size-1-0.json")
    job.set_hosts(HOSTS[:2])
    job.wait_for("size-2-1.json")
    job.set_hosts(HOSTS)
    job.wait_for("size-3-2.json")
    job.set_hosts(HOSTS[1:])  # the first rank leaves
    result = demand_whole(job, HOSTS[1:])
    assert result["sizes"] == [1, 2, 3, 2]
    demand_rates(result, 0.02 if "ELASTIC_PASSES" not in env else 0.01)
    return job


def demand_rates(result: dict[str, Any], expected: float) -> None:
    """Demand the learning rates of a worker: the optimizer's, and those of its schedule."""
    for rate in result["rates"]:
        assert math.isclose(rate, expected, rel_tol=1e-6), result["rates"]
