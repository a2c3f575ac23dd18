"""``hvdkit memory``: what a replica of a model holds while it trains, and whether it fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from hvdkit.bench.memory import Plan, Replica

__all__ = ["memory"]


@click.command()
@click.option(
    "--framework",
    type=click.Choice(["torch", "tensorflow"]),
    default="torch",
    show_default=True,
    help="tensorflow: a Keras 3 model on TensorFlow.",
)
@click.option(
    "--model",
    default="mlp",
    show_default=True,
    help="One of mlp, many-small, cnn, resnet50, vgg16, transformer, or MODULE:FUNCTION of your "
    "own, which returns a model.",
)
@click.option(
    "--loss",
    metavar="MODULE:FUNCTION",
    help="For a model of your own: called with it and a number of samples, returns their loss.",
)
@click.option(
    "--optimizer",
    default="sgd",
    show_default=True,
    help="One of sgd, momentum, adam, adamw, or MODULE:FUNCTION, called with the parameters "
    "(PyTorch) or with nothing (Keras).",
)
@click.option("--batch-size", type=click.IntRange(1), help="Samples of a pass.")
@click.option(
    "--bucket-size-mb",
    type=click.FloatRange(0, min_open=True),
    default=8.0,
    show_default=True,
    help="MiB of gradients that travel together.",
)
@click.option(
    "--device-memory-gib",
    type=click.FloatRange(0, min_open=True),
    help="What a worker may take; by default the GPU's memory, or the machine's.",
)
@click.option(
    "--workers-per-host",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Workers that share the machine's memory, where there is no GPU.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write it to this JSON file.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def memory(
    framework: str,
    model: str,
    loss: str | None,
    optimizer: str,
    batch_size: int | None,
    bucket_size_mb: float,
    device_memory_gib: float | None,
    workers_per_host: int,
    output: Path | None,
    force: bool,
) -> None:
    """Say what each replica holds, whether it fits, and what a smaller batch would change.

    Parameters, gradients and the optimizer's state are counted; what a step needs beside them is
    measured on one step of one worker (TensorFlow on a CPU: the activations alone are counted).
    Exit status 1 where it does not fit.
    """
    from rich.console import Console

    from hvdkit.bench.memory import Settings, describe, find_largest_batch, measure, plan_passes
    from hvdkit.results.files import require_writable, write_result

    settings = Settings(
        framework=framework,
        model=model,
        loss=loss,
        optimizer=optimizer,
        batch=batch_size,
        bucket_bytes=max(1, int(bucket_size_mb * (1 << 20))),
    )
    if output is not None:
        require_writable(output, force=force)
    console = Console(highlight=False)
    with Console(stderr=True).status(f"A step of {model} in {framework}"):
        replica = measure(settings)
    available = _find_available(replica, device_memory_gib, workers_per_host)
    plans = plan_passes(replica, available)
    console.print(_tabulate_parts(replica, model, optimizer))
    console.print(_tabulate_plans(plans))
    if not replica.peak_measured:
        console.print("Of a step, the activations are counted; TensorFlow measures on GPUs only.")
    if available is None:
        console.print("What the device has is unknown: say it with --device-memory-gib.")
    else:
        verdict = "fits into" if plans[0].fits else "does not fit into"
        console.print(f"One replica {verdict} {_show(available)} ({replica.device}).")
        console.print(_advise(plans, find_largest_batch(replica, available)), soft_wrap=True)
    console.print(
        "Plain data parallelism shards nothing: each worker holds all of this, however many there "
        "are. The framework's own code and caches are not counted.",
        soft_wrap=True,
    )
    if output is not None:
        write_result(output, describe(settings, replica, plans, available), force=force)
        console.print(f"Written to {output}", soft_wrap=True)
    if plans[0].fits is False:
        raise SystemExit(1)


def _find_available(replica: Replica, given_gib: float | None, workers: int) -> int | None:
    if given_gib is not None:
        return int(given_gib * (1 << 30))
    if replica.available is None or replica.device != "CPU":
        return replica.available
    return replica.available // workers


def _advise(plans: Sequence[Plan], largest: int | None) -> str:
    if largest == 0:
        return (
            "No batch fits: what does not depend on it is too much. Fewer parameters, 16-bit "
            "parameters, an optimizer with less state, or sharding (FSDP, ZeRO) would help."
        )
    if largest is None:
        return "Any batch fits: a step takes no more for more samples."
    advice = f"The largest batch that fits is about {largest}."
    fitting = next((plan for plan in plans if plan.fits), None)
    if fitting is not None and fitting.passes > 1:
        advice += (
            f" The same samples a step fit as {fitting.passes} passes of {fitting.samples} "
            f"(backward_passes_per_step={fitting.passes})."
        )
    return advice


def _tabulate_parts(replica: Replica, model: str, optimizer: str) -> Table:
    from rich.table import Table

    table = Table(title=f"A replica of {model} with {optimizer}, a batch of {replica.batch}")
    table.add_column("part")
    table.add_column("size", justify="right")
    for part, size in replica.parts.items():
        table.add_row(part, _show(size))
    table.add_section()
    table.add_row("all", _show(replica.total(replica.batch)))
    return table


def _tabulate_plans(plans: Sequence[Plan]) -> Table:
    from rich.table import Table

    table = Table(title="The same samples in a step, accumulated over passes")
    for heading in ("passes", "samples a pass", "a replica"):
        table.add_column(heading, justify="right")
    table.add_column("fits")
    for plan in plans:
        fits = {True: "yes", False: "no", None: "unknown"}[plan.fits]
        table.add_row(str(plan.passes), str(plan.samples), _show(plan.total_bytes), fits)
    return table


def _show(size_bytes: float) -> str:
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.2f} MiB"
