"""``hvdkit bench train``: throughput, scaling and step time, against other ways of doing it."""

from __future__ import annotations

from pathlib import Path

import click

from hvdkit.cli.measuring import (
    assemble_crew,
    describe_machine,
    measuring_options,
    run_with_progress,
)
from hvdkit.cli.names import split_names, split_numbers

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
    or srun, the command uses that job's ranks. For a quick look:
    --repeats 3 --steps 5; `hvdkit compare` needs 5 repeats.
    """
    from rich.console import Console

    from hvdkit.bench.goals import find_missed, find_unmeasured, parse_goal
    from hvdkit.bench.train import Settings, measure
    from hvdkit.cli.train_tables import print_conditions, print_ratios, print_runs
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
    print_runs(console, result["summary"])
    print_ratios(console, result["summary"])
    print_conditions(console, settings, result)
    describe_machine(console, result["machine"])
    missed = find_missed(goals, result["summary"])
    for line in missed:
        console.print(f"Missed {line}", style="bold", markup=False)
    if output is not None:  # last: a full disk must not keep the tables back
        write_result(output, result, force=force)
        console.print(f"Written to {output}", soft_wrap=True, markup=False)
    if missed:
        raise SystemExit(1)
