"""``hvdkit bench optimizer``: a training step against other ways of doing the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdkit.cli.measuring import describe_machine, measuring_options, run_with_progress
from hvdkit.cli.names import split_names

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["optimizer"]


@click.command()
@click.option(
    "--framework",
    type=click.Choice(["torch", "tensorflow", "keras"]),
    default="torch",
    show_default=True,
    help="tensorflow: raw variables and a tape; keras: fit.",
)
@click.option(
    "--models",
    default="mlp,many-small,cnn",
    show_default=True,
    callback=split_names,
    help="Models to train, separated by commas.",
)
@click.option(
    "--candidates",
    callback=split_names,
    help="Each is compared with those after it. By default hvdkit, horovod (stock), ddp or mwms "
    "(the framework's own), and single, which never communicates: the limit.",
)
@click.option("--rounds", default=15, show_default=True, help="Turns of each candidate.")
@click.option("--steps", default=15, show_default=True, help="Timed steps a turn.")
@measuring_options
def optimizer(
    framework: str,
    models: tuple[str, ...],
    candidates: tuple[str, ...] | None,
    rounds: int,
    steps: int,
    workers: int,
    threads: int,
    output: Path | None,
    force: bool,
) -> None:
    """Time a training step with hvdkit, stock Horovod, and what the framework has of its own.

    All candidates stay alive and take turns, so that a noisy machine is noisy for all of them.
    A step lasts as long as its slowest rank. For a quick look: --rounds 3 --steps 5 --models mlp.
    """
    from rich.console import Console

    from hvdkit.bench.optimizer import Settings, measure
    from hvdkit.errors import HvdkitError
    from hvdkit.install.installed import find_horovod
    from hvdkit.results.files import require_writable, write_result

    console = Console()
    settings = Settings(
        framework=framework,
        models=models,
        candidates=candidates,
        rounds=rounds,
        steps=steps,
        workers=workers,
        threads=threads,
    )
    if output is not None:
        require_writable(output, force=force)
    if find_horovod() is None:
        raise HvdkitError("Horovod is not installed in this environment; run: hvdkit install")
    turns = len(models) * rounds * len(settings.candidates or ())
    result = run_with_progress(lambda report: measure(settings, report), turns)
    console.print(_tabulate_steps(result))
    if result["summary"]["comparisons"]:
        console.print(_tabulate_ratios(result))
    console.print(f"{workers} workers, {threads} thread(s) each, {rounds} rounds of {steps} steps")
    describe_machine(console, result["machine"])
    if output is not None:  # last: a full disk must not keep the tables back
        write_result(output, result, force=force)
        console.print(f"Written to {output}", soft_wrap=True, highlight=False)


def _tabulate_steps(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="Median step, and peak resident memory of the largest worker")
    for heading in ("model", "parameters", "tensors", "candidate"):
        table.add_column(heading)
    table.add_column("step", justify="right")
    table.add_column("memory", justify="right")
    for name, model in result["summary"]["models"].items():
        shape = (name, f"{model['parameters']:,}", str(model["tensors"]))
        for candidate, measured in model["candidates"].items():
            step = f"{1e3 * measured['median_step_s']:.1f} ms"
            memory = f"{max(measured['peak_rss_bytes']) / 2**20:.0f} MiB"
            table.add_row(*shape, candidate, step, memory)
            shape = ("", "", "")
        table.add_section()
    return table


def _tabulate_ratios(result: dict[str, Any]) -> Table:
    from rich.table import Table

    def show(interval: dict[str, float]) -> str:
        return f"{interval['estimate']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"

    table = Table(title="Step time as a ratio (below 1: faster), with 95 % bootstrap intervals")
    summary = result["summary"]
    for heading in ("candidate", "of", *summary["models"], "geometric mean"):
        table.add_column(heading)
    for pair in summary["comparisons"]:
        cells = [show(pair["models"][name]) for name in summary["models"]]
        row = (pair["candidate"], pair["reference"], *cells, show(pair["geometric_mean"]))
        table.add_row(*row)
    return table
