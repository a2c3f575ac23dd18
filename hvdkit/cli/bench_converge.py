"""``hvdkit bench converge``: accuracy over samples and time, with more and more workers."""

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
    from rich.table import Table

__all__ = ["converge"]


@click.command()
@click.option(
    "--framework",
    type=click.Choice(["torch", "tensorflow"]),
    default="torch",
    show_default=True,
    help="tensorflow: Keras 3 and a tape.",
)
@click.option(
    "--task",
    "tasks",
    default="digits,text",
    show_default=True,
    callback=split_names,
    metavar="LIST",
    help="digits: 8 x 8 images; text: the next byte of Python's documentation.",
)
@click.option(
    "-np",
    "--np",
    "workers",
    default="1,2,4",
    show_default=True,
    callback=split_numbers,
    metavar="LIST",
    help="Numbers of workers, separated by commas.",
)
@click.option(
    "--rules",
    default="linear,sqrt,none",
    show_default=True,
    callback=split_names,
    metavar="LIST",
    help="For the learning rate, where the batch grows with the workers.",
)
@click.option("--seeds", default=3, show_default=True, help="Trainings of each kind.")
@click.option("--target", type=float, help="Accuracy to reach. [default: the task's own]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples a step of one worker.")
@click.option("--learning-rate", type=float, help="For that batch.")
@click.option("--samples", type=click.IntRange(min=1), help="To train on at most.")
@measuring_options
def converge(
    framework: str,
    tasks: tuple[str, ...],
    workers: tuple[int, ...],
    rules: tuple[str, ...],
    seeds: int,
    target: float | None,
    batch_size: int | None,
    learning_rate: float | None,
    samples: int | None,
    threads: int,
    hosts: str | None,
    output: Path | None,
    force: bool,
    horovodrun_options: tuple[str, ...],
) -> None:
    """Measure how many samples and seconds it takes to reach an accuracy.

    Each number of workers trains with the same global batch as one worker, and with a batch that
    grows with the workers and each rule for the learning rate. Several seeds take turns; the
    whole curves are in the output file.
    """
    from rich.console import Console

    from hvdkit.bench.converge import Settings, measure
    from hvdkit.results.files import write_result

    settings = Settings(
        framework=framework,
        tasks=tasks,
        workers=workers,
        rules=rules,
        seeds=seeds,
        batch=batch_size,
        learning_rate=learning_rate,
        target=target,
        samples=samples,
        threads=threads,
    )
    with assemble_crew(max(workers), hosts, horovodrun_options, output, force) as crew:
        if crew is None:
            return
        result = run_with_progress(
            lambda report: measure(settings, crew, report), settings.count_turns()
        )
    console = Console(highlight=False)
    for task in tasks:
        console.print(_tabulate(result["summary"], task))
    if any(run["reached"] < run["seeds"] for run in result["summary"]["runs"]):
        console.print("Where a target was not reached: more --samples, or a lower --target.")
    console.print(
        f"{framework}, {seeds} seed(s), {threads} thread(s) a worker; medians over the seeds that "
        "reached the target, where most did; evaluating is not counted"
    )
    describe_machine(console, result["machine"])
    if output is not None:
        write_result(output, result, force=force)
        console.print(f"Written to {output}", soft_wrap=True, markup=False)


def _tabulate(summary: dict[str, Any], task: str) -> Table:
    from rich.table import Table

    table = Table(title=f"{task}: to an accuracy of {summary['target'][task]:g}")
    for heading in ("np", "global batch", "rate"):
        table.add_column(heading, justify="right")
    table.add_column("rule")
    for heading in ("reached", "samples", "time", "accuracy at the end"):
        table.add_column(heading, justify="right")
    for run in summary["runs"]:
        if run["task"] != task:
            continue
        samples, time_s = run["samples_to_target"], run["time_to_target_s"]
        table.add_row(
            str(run["workers"]),
            str(run["global_batch"]),
            f"{run['learning_rate']:g}",
            run["learning_rate_rule"] if run["batch_rule"] == "scaled" else "same batch",
            f"{run['reached']} of {run['seeds']}",
            "" if samples is None else f"{samples:,.0f}",
            "" if time_s is None else f"{time_s:.2f} s",
            f"{run['final_accuracy']:.3f}",
        )
    return table
