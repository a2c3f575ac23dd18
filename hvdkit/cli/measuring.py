"""What the commands that measure have in common: options, progress, and where it was measured."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from hvdkit.bench.crew import Crew

__all__ = ["assemble_crew", "describe_machine", "measuring_options", "run_with_progress"]

# Load a core from which on a warning is given.
BUSY = 0.25


def measuring_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of every benchmark: threads, hosts, output and force."""
    options = (
        click.option("--threads", default=1, show_default=True, help="Compute threads a worker."),
        click.option("--hosts", metavar="LIST", help="As for horovodrun -H, for example a:4,b:4."),
        click.option(
            "--output",
            type=click.Path(path_type=Path),
            help="Write every sample and what was made of them to this JSON file.",
        ),
        click.option("--force", is_flag=True, help="Overwrite the output file."),
        click.argument("horovodrun_options", nargs=-1, type=click.UNPROCESSED),
    )
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def assemble_crew(
    workers: int,
    hosts: str | None,
    horovodrun_options: Sequence[str],
    output: Path | None,
    force: bool,
) -> Iterator[Crew | None]:
    """Give the slots to measure in: launched by horovodrun, or the ranks of a running job.

    Args:
        workers: How many are needed.
        hosts: Where; None for this host.
        horovodrun_options: Further ones.
        output: The file that shall be written; refused before anything is started.
        force: Whether it may be overwritten.

    Yields:
        The crew; None on the other ranks of a job, when rank 0 has done the work.
    """
    from hvdkit.bench.crew import Crew
    from hvdkit.bench.job import join, open_board, run_as_driver
    from hvdkit.env import place
    from hvdkit.errors import HvdkitError
    from hvdkit.install.installed import find_horovod
    from hvdkit.results.files import require_writable

    if find_horovod() is None:
        raise HvdkitError("Horovod is not installed in this environment; run: hvdkit install")
    # As Ctrl-C does: suspended workers must not outlive the one who could resume them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    board = open_board()
    if board is None:
        if output is not None:
            require_writable(output, force=force)
        with Crew(workers) as crew:
            crew.launch(hosts, horovodrun_options)
            yield crew
        return
    if hosts is not None or horovodrun_options:
        raise HvdkitError("inside of a job its own hosts are taken; leave --hosts out")
    if place().size < workers:
        raise HvdkitError(f"this job has {place().size} worker(s), and {workers} are asked for")
    if place().rank > 0:
        join(board)
        yield None
        return
    if output is not None:
        require_writable(output, force=force)
    with run_as_driver(board) as crew:
        yield crew


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
