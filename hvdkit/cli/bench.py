"""``hvdkit bench``: the group of the benchmarks."""

import click

from hvdkit.cli.lazy import LazyGroup

__all__ = ["bench"]

COMMANDS = {
    "optimizer": (
        "hvdkit.cli.bench_optimizer:optimizer",
        "Time a training step against other ways of doing it.",
    ),
    "allreduce": (
        "hvdkit.cli.bench_allreduce:allreduce",
        "Time all-reduces over message sizes; fit their cost.",
    ),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def bench() -> None:
    """Measure on this machine, against other ways of doing the same."""
