"""``hvdkit bench train``: throughput, scaling and step time, against other ways of doing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdkit.cli.measuring import (
    assemble_crew,
    describe_machine,
    measuring_options,
    run_with_progress,
)
from hvdkit.cli.names import split_names, split_numbers

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["train"]


@click.command()
@click.option(
    "--framework",
    type=click.Choice(["torch", "tensorflow", "keras", "keras-torch"]),
    default="torch",
    show_default=True,
    help="tensorflow: a tape over a Keras model; keras: fit on TensorFlow; keras-torch: fit on "
    "PyTorch.",
)
@click.option(
    "--model",
    "models",
    default="mlp",
    show_default=True,
    callback=split_names,
    metavar="LIST",
    help="Some of mlp, many-small, cnn, resnet50, vgg16, transformer, separated by commas.",
)
@click.option(
    "-np",
    "--np",
    "workers",
    default="1,2",
    show_default=True,
    callback=split_numbers,
    metavar="LIST",
    help="Numbers of workers, separated by commas.",
)
@click.option(
    "--against",
    default="",
    callback=split_names,
    metavar="LIST",
    help="Peers that take turns with hvdkit: horovod (stock), ddp (PyTorch), mwms (TensorFlow's "
    "MultiWorkerMirroredStrategy), single (no communication: the limit, always measured).",
)
@click.option("--batch-size", type=int, help="Samples a worker; with --strong, of all together.")
@click.option(
    "--weak/--strong",
    default=True,
    show_default=True,
    help="Whether the batch of a worker or that of all together stays the same.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of parameters, activations and gradients.",
)
@click.option("--accumulate", default=1, show_default=True, help="Passes a step.")
@click.option(
    "--compression",
    type=click.Choice(["none", "fp16", "bf16"]),
    default="none",
    show_default=True,
    help="What gradients travel in.",
)
@click.option("--bucket-size-mb", type=float, help="MiB of gradients that travel together.")
@click.option(
    "--input",
    "images",
    default="synthetic",
    show_default=True,
    metavar="synthetic|DIR",
    help="One batch of random numbers, or a folder CLASS/IMAGE, whose waits are counted apart.",
)
@click.option("--repeats", default=10, show_default=True, help="Turns of each candidate.")
@click.option("--steps", default=15, show_default=True, help="Timed steps a turn.")
@click.option(
    "--expect",
    multiple=True,
    metavar="GOAL",
    help="Such as 'scaling_efficiency>=0.8', 'step_time_p95_s<=0.2', 'ratio_to_ddp<=1' or "
    "'cost_per_million_samples<=1.5', of hvdkit with the most workers; exit 1 where missed. "
    "May be given several times.",
)
@click.option("--price-per-worker-hour", type=float, help="For the cost, in any currency.")
@measuring_options
def train(
    framework: str,
    models: tuple[str, ...],
    workers: tuple[int, ...],
    against: tuple[str, ...],
    batch_size: int | None,
    weak: bool,
    dtype: str,
    accumulate: int,
    compression: str,
    bucket_size_mb: float | None,
    images: str,
    repeats: int,
    steps: int,
    expect: tuple[str, ...],
    price_per_worker_hour: float | None,
    threads: int,
    hosts: str | None,
    output: Path | None,
    force: bool,
    horovodrun_options: tuple[str, ...],
) -> None:
    """Measure how fast training runs, and how it scales with the workers.

    All candidates stay alive and take turns, so that a noisy machine is noisy for all of them. A
    step lasts as long as its slowest rank; samples/s are those of all workers together. Workers
    are launched by horovodrun (options for it after `--`); started inside of a job of horovodrun
    or srun, the command uses that job's ranks. For a quick look: --repeats 3 --steps 5.
    """
    from rich.console import Console

    from hvdkit.bench.goals import find_missed, find_unmeasured, parse_goal
    from hvdkit.bench.train import Settings, measure
    from hvdkit.errors import HvdkitError
    from hvdkit.results.files import write_result

    goals = [parse_goal(text) for text in expect]
    settings = Settings(
        framework=framework,
        models=models,
        workers=workers,
        against=against,
        batch=batch_size,
        strong=not weak,
        repeats=repeats,
        steps=steps,
        threads=threads,
        dtype=dtype,
        accumulate=accumulate,
        compression=compression,
        bucket_size_mb=bucket_size_mb,
        input=None if images == "synthetic" else images,
        price_per_worker_hour=price_per_worker_hour,
    )
    problem = find_unmeasured(
        goals,
        workers,
        (*against, "single"),
        has_input=settings.input is not None,
        has_price=price_per_worker_hour is not None,
    )
    if problem:
        raise HvdkitError(problem)
    with assemble_crew(max(workers), hosts, horovodrun_options, output, force) as crew:
        if crew is None:
            return
        result = run_with_progress(
            lambda report: measure(settings, crew, report), settings.count_turns()
        )
    console = Console(highlight=False)
    _print_runs(console, result["summary"])
    _print_ratios(console, result["summary"])
    _print_conditions(console, settings, result)
    describe_machine(console, result["machine"])
    missed = find_missed(goals, result["summary"])
    for line in missed:
        console.print(f"Missed {line}", style="bold", markup=False)
    if output is not None:  # last: a full disk must not keep the tables back
        write_result(output, result, force=force)
        console.print(f"Written to {output}", soft_wrap=True, markup=False)
    if missed:
        raise SystemExit(1)


def _print_runs(console: Console, summary: dict[str, Any]) -> None:
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


def _print_ratios(console: Console, summary: dict[str, Any]) -> None:
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


def _print_conditions(console: Console, settings: Any, result: dict[str, Any]) -> None:
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
