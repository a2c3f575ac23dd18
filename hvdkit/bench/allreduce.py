"""Latency and bandwidth of all-reduces over message sizes, in interleaved rounds.

Source: algorithm and bus bandwidth as NVIDIA's nccl-tests define them (doc/PERFORMANCE.md):
bytes over time, and that times 2 (n - 1) / n, the share that each of n ranks sends in the best
algorithms, so that numbers of different n and of the hardware can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvdkit.bench.catalog import ENVIRONMENT
from hvdkit.bench.crew import Crew
from hvdkit.bench.settings import require_known, require_positive
from hvdkit.bench.team import Team
from hvdkit.bench.timing import find_slowest, rotate
from hvdkit.errors import HvdkitError
from hvdkit.results.files import make_result, make_series
from hvdkit.results.fingerprint import read_fingerprint

__all__ = ["CANDIDATES", "DTYPES", "Settings", "fit_cost", "measure", "recommend_bucket_bytes"]

CANDIDATES = ("hvdkit", "horovod", "torch", "copy")
DTYPES = {"float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
READY_S = 300

# A turn takes about as long for every size, within these bounds.
TURN_BYTES = 64 << 20
OPERATIONS = (5, 50)
# A bucket is large enough when no more than this share of its time is latency.
LATENCY_SHARE = 0.1
BUCKET_BYTES = (1 << 20, 64 << 20)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        sizes_bytes: of a message.
        dtypes: names from ``DTYPES``.
        candidates: names from ``CANDIDATES``.
        tensors: how many tensors a message is made of, which are reduced as one group.
        rounds: how often each candidate gets its turn with each message.
        workers: processes a candidate.
        threads: compute threads a process.
    """

    sizes_bytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float32",)
    candidates: tuple[str, ...] = CANDIDATES
    tensors: int = 1
    rounds: int = 5
    workers: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        """Refuse names that do not exist, counts below one and messages without an element."""
        require_known("dtypes", self.dtypes, DTYPES)
        require_known("candidates", self.candidates, CANDIDATES)
        require_positive(self, "tensors", "rounds", "threads")
        if self.workers < 2:
            raise HvdkitError(f"an all-reduce needs at least 2 workers; got {self.workers}")
        if not self.sizes_bytes or len(set(self.sizes_bytes)) < len(self.sizes_bytes):
            raise HvdkitError("sizes must be distinct, and at least one")
        smallest = self.tensors * max(DTYPES[name] for name in self.dtypes)
        if min(self.sizes_bytes) < smallest:
            raise HvdkitError(
                f"a message of {min(self.sizes_bytes)} bytes is too small: {self.tensors} "
                f"tensor(s) of one element need {smallest}"
            )


def measure(settings: Settings, crew: Crew, report: Callable[[str, int], None]) -> dict[str, Any]:
    """Time every message of every candidate; return the result, ready for ``write_result``.

    Args:
        settings: what to measure.
        crew: At least as many slots as there are workers.
        report: called with what goes on now and the number of turns done since the last call.

    Raises:
        HvdkitError: workers could not be launched or broke off, or a sum was wrong.
    """
    machine = read_fingerprint()
    messages = [(dtype, size) for dtype in settings.dtypes for size in settings.sizes_bytes]
    samples: dict[tuple[str, str, int], list[list[list[float]]]] = {}
    teams: dict[str, Team] = {}
    for candidate in settings.candidates:
        report(f"start {candidate}", 0)
        teams[candidate] = crew.start(
            candidate,
            "hvdkit.bench.allreduce_worker",
            {"candidate": candidate, "threads": settings.threads},
            size=settings.workers,
            threads=settings.threads,
            environment=ENVIRONMENT.get(candidate),
        )
        teams[candidate].wait_until_ready(READY_S)
    for turn in range(settings.rounds):
        for dtype, size in messages:
            for candidate in rotate(list(teams), turn):
                answers = teams[candidate].ask(_make_request(dtype, size, settings.tensors))
                _require_right(answers, candidate, dtype, size)
                durations_s = [answer["durations_s"] for answer in answers]
                samples.setdefault((candidate, dtype, size), []).append(durations_s)
                report(f"{candidate}, {size} bytes of {dtype}", 1)
    for team in teams.values():
        team.finish()
    series = [
        make_series(
            "allreduce_s",
            "s",
            rounds,
            lower_is_better=True,
            candidate=candidate,
            dtype=dtype,
            size_bytes=size,
            tensors=settings.tensors,
            workers=settings.workers,
            threads=settings.threads,
            controller="gloo",
        )
        for (candidate, dtype, size), rounds in samples.items()
    ]
    summary = summarize(samples, settings.workers)
    return make_result("allreduce", asdict(settings), series, summary, machine)


def summarize(
    samples: Mapping[tuple[str, str, int], Sequence[Sequence[Sequence[float]]]], workers: int
) -> dict[str, Any]:
    """Make latencies, bandwidths, fits and the recommendation from samples.

    Args:
        samples: seconds as [round][rank][operation], by candidate, dtype and size in bytes.
        workers: number of ranks.
    """
    rows: list[dict[str, Any]] = []
    for (candidate, dtype, size), rounds in samples.items():
        time_s = median(median(find_slowest(ranks)) for ranks in rounds)
        bandwidth = size / time_s
        # A copy has no share that travels: its bandwidth is that of the memory.
        share = 1.0 if candidate == "copy" else 2 * (workers - 1) / workers
        rows.append(
            {
                "candidate": candidate,
                "dtype": dtype,
                "size_bytes": size,
                "time_s": time_s,
                "algorithm_bandwidth_bytes_per_s": bandwidth,
                "bus_bandwidth_bytes_per_s": bandwidth * share,
            }
        )
    fits: list[dict[str, Any]] = []
    for candidate, dtype in dict.fromkeys((row["candidate"], row["dtype"]) for row in rows):
        points = [
            (row["size_bytes"], row["time_s"])
            for row in rows
            if (row["candidate"], row["dtype"]) == (candidate, dtype)
        ]
        cost = fit_cost(points) if len(points) > 1 else None
        if cost is None:
            continue
        latency_s, bandwidth = cost
        fit = {"candidate": candidate, "dtype": dtype, "latency_s": latency_s}
        fits.append(fit | {"bandwidth_bytes_per_s": bandwidth})
    summary: dict[str, Any] = {"messages": rows, "fits": fits}
    for fit in fits:
        if fit["candidate"] == "hvdkit" and "bucket_size_bytes" not in summary:
            summary["bucket_size_bytes"] = recommend_bucket_bytes(
                fit["latency_s"], fit["bandwidth_bytes_per_s"]
            )
    return summary


def fit_cost(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Fit ``time = latency + size / bandwidth``; return latency in s, bandwidth in bytes/s.

    None where larger messages did not take longer, as among sizes that are all latency.

    Least squares of the relative error, so that small messages count as much as large ones;
    neither part may be negative.

    Args:
        points: sizes in bytes and times in seconds, of at least two sizes.

    Source: R. Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994).
    """
    # Columns 1/t and s/t, target 1: the normal equations of two unknowns.
    a11 = sum(1 / t**2 for _, t in points)
    a12 = sum(s / t**2 for s, t in points)
    a22 = sum(s * s / t**2 for s, t in points)
    b1 = sum(1 / t for _, t in points)
    b2 = sum(s / t for s, t in points)
    determinant = a11 * a22 - a12 * a12
    latency_s = (b1 * a22 - b2 * a12) / determinant
    per_byte_s = (a11 * b2 - a12 * b1) / determinant
    if latency_s < 0:
        latency_s, per_byte_s = 0.0, b2 / a22
    elif per_byte_s <= 0:
        return None
    return latency_s, 1 / per_byte_s


def recommend_bucket_bytes(latency_s: float, bandwidth_bytes_per_s: float) -> int:
    """Return the smallest power of two of which at most a tenth of the time is latency.

    Between 1 and 64 MiB: smaller buckets cost more operations than they hide, larger ones begin
    too late.
    """
    enough = latency_s * bandwidth_bytes_per_s * (1 - LATENCY_SHARE) / LATENCY_SHARE
    size = BUCKET_BYTES[0]
    while size < min(enough, BUCKET_BYTES[1]):
        size *= 2
    return size


def _make_request(dtype: str, size_bytes: int, tensors: int) -> dict[str, Any]:
    fewest, most = OPERATIONS
    operations = max(fewest, min(most, TURN_BYTES // size_bytes))
    return {"dtype": dtype, "size_bytes": size_bytes, "tensors": tensors, "operations": operations}


def _require_right(
    answers: Sequence[Mapping[str, Any]], candidate: str, dtype: str, size: int
) -> None:
    wrong = {rank: answer["wrong"] for rank, answer in enumerate(answers) if answer["wrong"]}
    if wrong:
        where = ", ".join(f"{count} on rank {rank}" for rank, count in wrong.items())
        raise HvdkitError(
            f"{candidate} computed wrong sums of {size} bytes of {dtype}: {where}. Do not train "
            "on this: run `hvdkit check`, and try HOROVOD_SOCKETS_ONLY=1"
        )
