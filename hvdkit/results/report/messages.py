"""The sections of ``hvdkit bench allreduce``: bandwidth over message sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.results.report.numbers import join, show, show_ms, show_size
from hvdkit.results.report.parts import Line, LineChart, Named, Section, Table

__all__ = ["describe_messages"]

Row = Mapping[str, Any]


def describe_messages(results: Sequence[Named]) -> list[Section]:
    """Return a section for each data type and number of workers.

    Args:
        results: Of the driver allreduce.
    """
    groups: dict[tuple[str, Any], dict[str, list[Row]]] = {}
    for named in results:
        workers = named.result["series"][0]["labels"].get("workers")
        for row in named.summary["messages"]:
            group = groups.setdefault((row["dtype"], workers), {})
            group.setdefault(named.name if len(results) > 1 else "", []).append(row)
    sections = [
        _describe_group(dtype, workers, files) for (dtype, workers), files in groups.items()
    ]
    fits = _tabulate_fits(results)
    if fits.rows:
        sections.append(Section("What an all-reduce costs", tables=[fits], notes=_advise(results)))
    return sections


def _describe_group(dtype: str, workers: Any, files: Mapping[str, Sequence[Row]]) -> Section:
    lines = []
    rows = []
    several = len(files) > 1
    for name, found in files.items():
        for candidate in dict.fromkeys(row["candidate"] for row in found):
            chosen = sorted(
                (row for row in found if row["candidate"] == candidate),
                key=lambda row: row["size_bytes"],
            )
            sizes = [row["size_bytes"] for row in chosen]
            speeds = [row["bus_bandwidth_bytes_per_s"] / 1e9 for row in chosen]
            lines.append(Line(join(name if several else "", candidate), sizes, speeds))
            rows += [
                (
                    *([name] if several else []),
                    candidate,
                    show_size(row["size_bytes"]),
                    show_ms(row["time_s"]),
                    show(row["algorithm_bandwidth_bytes_per_s"] / 1e9),
                    show(row["bus_bandwidth_bytes_per_s"] / 1e9),
                )
                for row in chosen
            ]
    what = f"All-reduce of {dtype}" + (f", {workers} workers" if workers is not None else "")
    title = f"{what}: bus bandwidth"
    chart = LineChart(title, "message size", "GB/s", lines, x_axis="bytes", y_axis="log")
    headings = ["candidate", "size", "time (ms)", "algorithm (GB/s)", "bus (GB/s)"]
    headings = [*(["file"] if several else []), *headings]
    table = Table(f"{what}: median time and bandwidth", headings, rows, len(headings) - 4)
    return Section(
        what if several else join(what, *files),
        [chart],
        [table],
        [
            "Bus bandwidth is bytes over time, times 2 (n - 1) / n for n workers (nccl-tests). "
            "An operation lasts as long as its slowest rank. copy is no all-reduce: the same bytes "
            "copied in memory, to compare with."
        ],
    )


def _tabulate_fits(results: Sequence[Named]) -> Table:
    several = len(results) > 1
    rows = [
        (
            *([named.name] if several else []),
            fit["candidate"],
            fit["dtype"],
            show_ms(fit["latency_s"]),
            show(fit["bandwidth_bytes_per_s"] / 1e9),
        )
        for named in results
        for fit in named.summary["fits"]
    ]
    headings = [*(["file"] if several else []), "candidate", "dtype", "latency (ms)"]
    headings.append("bandwidth (GB/s)")
    title = "Fitted: time = latency + size / bandwidth"
    return Table(title, headings, rows, len(headings) - 2)


def _advise(results: Sequence[Named]) -> list[str]:
    return [
        f"{named.name}: a bucket_size_mb of {size >> 20} keeps latency below a tenth of the time."
        for named in results
        if (size := named.summary.get("bucket_size_bytes")) is not None
    ]
