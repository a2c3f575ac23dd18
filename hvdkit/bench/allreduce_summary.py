"""What the samples of all-reduces mean: bandwidths, a fit of their cost, settings that follow.

Source: algorithm and bus bandwidth as NVIDIA's nccl-tests define them (doc/PERFORMANCE.md):
bytes over time, and that times 2 (n - 1) / n, the share that each of n ranks sends in the best
algorithms, so that numbers of different n and of the hardware can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from hvdkit import settings
from hvdkit.bench.timing import find_slowest
from hvdkit.errors import HvdkitError

__all__ = ["fit_cost", "recommend_bucket_bytes", "save_settings", "summarize"]

# A bucket is large enough when no more than this share of its time is latency.
LATENCY_SHARE = 0.1
BUCKET_BYTES = (1 << 20, 64 << 20)


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
    # The geometric mean: in a sum, only the largest message would count.
    means_s = {
        name: geometric_mean(row["time_s"] for row in rows if row["candidate"] == name)
        for name in dict.fromkeys(row["candidate"] for row in rows)
        if name.startswith("hvdkit, cycle")
    }
    if means_s:
        summary["cycle_time_ms"] = float(min(means_s, key=means_s.__getitem__).split()[2])
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


def save_settings(summary: Mapping[str, Any]) -> Path:
    """Save what was recommended where adapters look for it; return the file.

    What was not measured this time stays as it was saved before.

    Raises:
        HvdkitError: Nothing is recommended, or the file cannot be written.
    """
    if "bucket_size_bytes" not in summary:
        raise HvdkitError(
            "nothing saved: larger messages did not take longer, so no bucket size follows; "
            "measure more --sizes, or when the machine is idle"
        )
    try:
        saved = settings.read_settings()
    except HvdkitError:
        saved = settings.Settings()  # damaged: it is written anew
    cycle_time_ms = summary.get("cycle_time_ms", saved.cycle_time_ms)
    size_mb = summary["bucket_size_bytes"] / (1 << 20)
    return settings.write_settings(settings.Settings(size_mb, cycle_time_ms))
