"""``hvdkit bench allreduce``: what a message costs, by size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdkit.cli.measuring import (
    assemble_crew,
    describe_machine,
    measuring_options,
    run_with_progress,
)
from hvdkit.cli.names import split_durations, split_names

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["allreduce"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _parse_sizes(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...]:
    sizes = []
    for text in split_names(ctx, parameter, value) or ():
        match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
        if match is None:
            raise click.BadParameter(f"{text!r} is no size; write 4096, 64K, 8M or 1G")
        sizes.append(int(match[1]) * _UNITS[match[2].upper()])
    return tuple(sizes)


@click.command()
@click.option(
    "--sizes",
    default="1K,16K,256K,1M,4M,16M,64M",
    show_default=True,
    callback=_parse_sizes,
    metavar="LIST",
    help="Bytes of a message, separated by commas.",
)
@click.option(
    "--dtypes",
    default="float32",
    show_default=True,
    callback=split_names,
    metavar="LIST",
    help="Some of float16, float32, float64, int32, int64, separated by commas.",
)
@click.option(
    "--candidates",
    default="hvdkit,horovod,torch,copy",
    show_default=True,
    callback=split_names,
    help="horovod: with hvdkit's changes switched off; mpi: Horovod on MPI, where it is built; "
    "torch: torch.distributed on Gloo; copy: no communication, the same bytes copied in memory.",
)
@click.option(
    "--cycle-times",
    callback=split_durations,
    metavar="LIST",
    help="Of Horovod's cycle, in ms, to choose the best from; for example 0.5,1,2.",
)
@click.option(
    "--write-config",
    is_flag=True,
    help="Save the bucket size and cycle time that suit this machine; hvdkit's optimizers and "
    "tapes take them from then on, unless told otherwise.",
)
@click.option("--tensors", default=1, show_default=True, help="Tensors that make up a message.")
@click.option("--rounds", default=5, show_default=True, help="Turns of each candidate a message.")
@click.option("-np", "--np", "workers", default=2, show_default=True, help="Workers.")
@measuring_options
def allreduce(
    sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    candidates: tuple[str, ...],
    cycle_times: tuple[float, ...] | None,
    write_config: bool,
    tensors: int,
    rounds: int,
    workers: int,
    threads: int,
    hosts: str | None,
    output: Path | None,
    force: bool,
    horovodrun_options: tuple[str, ...],
) -> None:
    """Time all-reduces over message sizes, check every sum, fit what they cost.

    An operation lasts as long as its slowest rank. Bandwidths are nccl-tests' bus bandwidth: bytes
    over time, times 2 (n - 1) / n for n workers.
    """
    from rich.console import Console

    from hvdkit.bench.allreduce import Settings, measure
    from hvdkit.bench.allreduce_summary import save_settings
    from hvdkit.env import launcher
    from hvdkit.errors import HvdkitError
    from hvdkit.install.installed import find_horovod
    from hvdkit.results.files import write_result

    settings = Settings(
        sizes_bytes=sizes,
        dtypes=dtypes,
        candidates=candidates,
        cycle_times_ms=cycle_times or (),
        tensors=tensors,
        rounds=rounds,
        workers=workers,
        threads=threads,
    )
    if write_config and ("hvdkit" not in candidates or len(sizes) < 2):
        raise HvdkitError("--write-config needs the candidate hvdkit and at least two sizes")
    horovod = find_horovod()
    if horovod is None or "torch" not in horovod.libraries:
        raise HvdkitError(
            "Horovod for PyTorch, which this measures with, is not installed in this environment: "
            "install PyTorch, then run: hvdkit install"
        )
    controllers = horovod.record.get("controllers")
    if "mpi" in candidates and isinstance(controllers, list) and "mpi" not in controllers:
        raise HvdkitError("This Horovod was built without MPI; run: hvdkit install --with-mpi")
    if "mpi" in candidates and (hosts or horovodrun_options or launcher() is not None):
        raise HvdkitError(
            "mpi is measured on this host, outside of a job, and without options for horovodrun; "
            "leave it out of --candidates"
        )
    console = Console(highlight=False)
    with assemble_crew(workers, hosts, horovodrun_options, output, force) as crew:
        if crew is None:
            return
        result = run_with_progress(
            lambda report: measure(settings, crew, report), settings.count_turns()
        )
    for dtype in dtypes:
        console.print(_tabulate(result, dtype))
    for fit in result["summary"]["fits"]:
        console.print(
            f"{fit['candidate']}, {fit['dtype']}: {1e3 * fit['latency_s']:.3f} ms + size / "
            f"{fit['bandwidth_bytes_per_s'] / 1e9:.2f} GB/s"
        )
    if len(result["summary"]["fits"]) < (len(candidates) + len(cycle_times or ())) * len(dtypes):
        console.print("No latency and bandwidth where larger messages did not take longer.")
    if "bucket_size_bytes" in result["summary"]:
        size = result["summary"]["bucket_size_bytes"] >> 20
        console.print(f"A bucket_size_mb of {size} keeps latency below a tenth of the time.")
    if "cycle_time_ms" in result["summary"]:
        console.print(f"The cycle of {result['summary']['cycle_time_ms']:g} ms took least.")
    console.print(f"{workers} workers, {threads} thread(s) each, {rounds} rounds; all sums right")
    describe_machine(console, result["machine"])
    if output is not None:
        write_result(output, result, force=force)
        console.print(f"Written to {output}", soft_wrap=True)
    if write_config:
        saved = save_settings(result["summary"])
        console.print(f"Saved for this machine: {saved}", soft_wrap=True)


def _tabulate(result: dict[str, Any], dtype: str) -> Table:
    from rich.table import Table

    rows = [row for row in result["summary"]["messages"] if row["dtype"] == dtype]
    candidates = list(dict.fromkeys(row["candidate"] for row in rows))
    table = Table(title=f"All-reduce of {dtype}: median time, bus bandwidth")
    table.add_column("size", justify="right")
    for candidate in candidates:
        table.add_column(candidate, justify="right")
    for size in dict.fromkeys(row["size_bytes"] for row in rows):
        cells = [
            f"{1e3 * row['time_s']:.3f} ms\n{row['bus_bandwidth_bytes_per_s'] / 1e9:.2f} GB/s"
            for row in rows
            if row["size_bytes"] == size
        ]
        table.add_row(_show_size(size), *cells)
    return table


def _show_size(size_bytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        factor = _UNITS[unit[0]]
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"
