"""``hvdkit bench``: the group of the benchmarks."""

import click

from hvdkit.cli.lazy import LazyGroup

__all__ = ["bench"]

COMMANDS = {
    "train": (
        "hvdkit.cli.bench_train:train",
        "Throughput, scaling and step time of training, against other ways.",
    ),
    "converge": (
        "hvdkit.cli.bench_converge:converge",
        "Samples and seconds to an accuracy, with more workers.",
    ),
    "allreduce": (
        "hvdkit.cli.bench_allreduce:allreduce",
        "Time all-reduces over message sizes; fit their cost.",
    ),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def bench() -> None:
    """Measure on this machine, against other ways of doing the same."""
