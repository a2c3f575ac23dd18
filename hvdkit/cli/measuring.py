"""What the commands that measure have in common: progress, and where it was measured."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["describe_machine", "measuring_options", "run_with_progress"]

# Load a core from which on a warning is given.
BUSY = 0.25


def measuring_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of every benchmark: workers, threads, output and force."""
    options = (
        click.option(
            "-np", "--workers", default=2, show_default=True, help="Processes a candidate."
        ),
        click.option("--threads", default=1, show_default=True, help="Compute threads a process."),
        click.option(
            "--output",
            type=click.Path(path_type=Path),
            help="Write every sample and what was made of them to this JSON file.",
        ),
        click.option("--force", is_flag=True, help="Overwrite the output file."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def run_with_progress(
    action: Callable[[Callable[[str, int], None]], dict[str, Any]], turns: int
) -> dict[str, Any]:
    """Run a measurement; show what goes on.

    Args:
        action: Called with a function to report by: what goes on, and turns done since.
        turns: How many there are.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # As Ctrl-C does: suspended workers must not outlive the one who could resume them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=turns)
        return action(lambda text, done: progress.update(task, description=text, advance=done))


def describe_machine(console: Console, machine: Mapping[str, Any]) -> None:
    """Print where a result was measured, and whether the machine was busy with something else."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}; {versions}"
    )
    if machine["load"] > BUSY * machine["cores"]:
        console.print(
            f"Other programs were running when this began (load {machine['load']:.1f} on "
            f"{machine['cores']} cores): expect wide intervals, or measure again when idle."
        )
