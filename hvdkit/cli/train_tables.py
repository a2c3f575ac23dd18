"""What ``hvdkit bench train`` prints of a result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_conditions", "print_ratios", "print_runs"]


def print_runs(console: Console, summary: dict[str, Any]) -> None:
    """Print a table for each model: throughput, step times, scaling, waiting, memory."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    runs = summary["runs"]
    for model in dict.fromkeys(run["model"] for run in runs):
        chosen = [run for run in runs if run["model"] == model]
        first = chosen[0]
        batch = f"a batch of {first['batch']} a worker"
        if first["scaling"] == "strong":
            batch = f"a batch of {first['global_batch'] // first['accumulate']} in all"
        title = f"{model}, {first['scaling']} scaling: {batch} (times in ms)"
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("candidate", no_wrap=True)
        headings = ["np", "samples/s", "step", "p95", "ranks", "scaling", "comm.", "MiB"]
        shows_input = first["input_share"] is not None
        shows_cost = first["cost_per_million_samples"] is not None
        headings += ["input"] * shows_input + ["cost/M"] * shows_cost
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for run in chosen:
            cells = [
                run["candidate"],
                str(run["workers"]),
                _show_throughput(run["samples_per_s"]),
                f"{1e3 * run['step_time_s']:.4g}",
                f"{1e3 * run['step_time_p95_s']:.4g}",
                f"{run['rank_spread']:.2f}",
                _show_share(run["scaling_efficiency"]),
                _show_share(run["communication_share"]),
                f"{run['peak_memory_bytes'] / 2**20:,.0f}",
            ]
            if shows_input:
                cells.append(_show_share(run["input_share"]))
            if shows_cost:
                cells.append(f"{run['cost_per_million_samples']:.4g}")
            table.add_row(*cells)
        console.print(table)


def print_ratios(console: Console, summary: dict[str, Any]) -> None:
    """Print hvdkit's step times as ratios of those of its peers."""
    from rich.table import Table

    means = [{"model": "geometric mean", **mean} for mean in summary["geometric_means"]]
    ratios = [one for one in summary["ratios"] + means if one["candidate"] == "hvdkit"]
    table = Table(title="Step time as a ratio (below 1: faster), with 95 % bootstrap intervals")
    for heading in ("candidate", "of", "workers", "model", "ratio"):
        table.add_column(heading)
    for one in ratios:
        ratio = f"{one['estimate']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
        names = (one["candidate"], one["reference"], str(one["workers"]), one["model"])
        table.add_row(*names, ratio)
    if table.row_count:
        console.print(table)


def print_conditions(console: Console, settings: Any, result: dict[str, Any]) -> None:
    """Print what all runs have in common, and what the columns mean."""
    runs = result["summary"]["runs"]
    console.print(
        f"{settings.framework}, {settings.dtype}, {settings.threads} thread(s) a worker in every "
        f"run, {settings.repeats} turns of {settings.steps} steps, in turn; hosts: "
        f"{', '.join(result['summary']['hosts'])}"
    )
    others = {
        "accumulate": settings.accumulate if settings.accumulate > 1 else None,
        "compression": settings.compression if settings.compression != "none" else None,
        "bucket size": f"{settings.bucket_size_mb:g} MiB" if settings.bucket_size_mb else None,
        "input": settings.input,
    }
    if any(others.values()):
        said = (f"{name} {value}" for name, value in others.items() if value)
        console.print(", ".join(said), markup=False)
    loops = [name for name in settings.against if name != "single"]
    if settings.framework.startswith("keras") and loops:
        console.print(f"{', '.join(loops)}: a loop of its own on the same model, not fit")
    overhead = max(run["overhead_share"] for run in runs)
    console.print(
        "samples/s: of all workers together; ranks: the slowest one's step over the fastest one's; "
        "scaling: efficiency; comm.: what a step takes beyond that of single, which does all but "
        f"communicate; MiB: of the largest worker. The clock takes {overhead:.4%} of a step."
    )
    cores, most = result["machine"]["cores"], max(run["workers"] for run in runs)
    if len(result["summary"]["hosts"]) == 1 and most * settings.threads > cores:
        console.print(
            f"{most} workers with {settings.threads} thread(s) share {cores} cores: their "
            "efficiency is that of this machine, not of more workers elsewhere"
        )


def _show_share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _show_throughput(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
