"""``hvdkit predict``: what more workers would bring, from measurements or from given numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdkit.cli.names import split_names

if TYPE_CHECKING:
    from rich.table import Table

    from hvdkit.profile.given import Given

__all__ = ["predict"]


class _Finite(click.FloatRange):
    """A number in a range; neither NaN nor infinity, which a plain range lets through."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number that anything takes", param, ctx)
        return number


POSITIVE, NOT_NEGATIVE, SHARE = _Finite(0, min_open=True), _Finite(0), _Finite(0, 1)
COUNT = click.IntRange(1)


def _parse_workers(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    names = split_names(ctx, parameter, value)
    if names is None:
        return None
    if not names or not all(name.isdecimal() and int(name) > 0 for name in names):
        raise click.BadParameter(f"{value!r} is no list of numbers; write 1,2,4")
    return tuple(sorted({int(name) for name in names}))


def _given_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that stand in place of a measurement."""
    options = (
        click.option(
            "--step-time-s",
            "--compute-time-s",
            "step_time_s",
            type=POSITIVE,
            help="A step of one worker, which reduces nothing.",
        ),
        click.option(
            "--fixed-time-s", type=NOT_NEGATIVE, help="What of it does not depend on the samples."
        ),
        click.option("--parameters", type=POSITIVE, help="Of the model."),
        click.option("--dtype-bytes", type=POSITIVE, help="Of a gradient as it travels.  [4]"),
        click.option(
            "--batch-size",
            type=COUNT,
            help="Samples a step: of each worker, or with --strong of all together.",
        ),
        click.option(
            "--latency-us", type=NOT_NEGATIVE, help="Of a message between hosts, in microseconds."
        ),
        click.option(
            "--bandwidth-gbit-s",
            type=POSITIVE,
            help="Of a host's network adapter, for what is sent: a share of the nominal one.",
        ),
        click.option(
            "--intra-latency-us", type=NOT_NEGATIVE, help="Of a message within a host, the same."
        ),
        click.option(
            "--intra-bandwidth-gbytes-s",
            type=POSITIVE,
            help="From worker to worker of a host; the bus bandwidth of nccl-tests.",
        ),
        click.option("--workers-per-host", type=COUNT, help="Of a full host."),
        click.option(
            "--slots-per-host",
            type=COUNT,
            help="Workers that compute at full speed side by side; more take turns. By default "
            "the accelerators of the measured host, or its cores over the threads of a worker.",
        ),
        click.option(
            "--overlap",
            type=SHARE,
            help="Share of the communication that runs beside the computation: near 1 for GPUs.",
        ),
        click.option(
            "--straggler",
            type=NOT_NEGATIVE,
            help="Scatter of a worker's step, as a share of it: the slowest of n takes longer by "
            "this times ln(n). About 0.8 of the standard deviation.",
        ),
        click.option("--bucket-size-mb", type=POSITIVE, help="Of gradients that travel together."),
        click.option(
            "--algorithm",
            type=click.Choice(["ring", "hierarchical"]),
            default="ring",
            show_default=True,
            help="Of the all-reduce over several hosts.",
        ),
        click.option("--weak/--strong", default=None, help="A batch for each worker, or for all."),
        click.option("--price-per-worker-hour", type=NOT_NEGATIVE, help="In any currency."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("results", nargs=-1, type=click.Path(path_type=Path), metavar="[RESULT]...")
@click.option("--model", help="Which of those that the results hold.")
@click.option("--framework", help="The same.")
@click.option("--candidate", default="hvdkit", show_default=True, help="Whose steps.")
@_given_options
@click.option(
    "--workers",
    callback=_parse_workers,
    metavar="LIST",
    help="Numbers to predict.  [powers of two up to 4096]",
)
@click.option(
    "--uncertainty",
    type=_Finite(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="By what share the numbers given here may be wrong, up and down.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write it to this JSON file.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def predict(
    results: tuple[Path, ...],
    model: str | None,
    framework: str | None,
    candidate: str,
    workers: tuple[int, ...] | None,
    uncertainty: float,
    output: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Predict step time, efficiency and cost for more workers, and say what binds.

    RESULTs are of `hvdkit bench train` (for a machine's speed, its runs of the candidates hvdkit
    and single with 1, 2 and more workers) and of `hvdkit bench allreduce` (for latency and
    bandwidth), of one model on one machine. Numbers given as options stand in their place; with
    all of them, no RESULT is needed.

    Bands are 95 % of what resampled measurements, and given numbers within --uncertainty, come to.
    They know nothing of what the model leaves out.
    """
    from rich.console import Console

    from hvdkit.profile.measured import collect
    from hvdkit.profile.prediction import describe
    from hvdkit.profile.prediction import predict as predict_points
    from hvdkit.results.files import read_result, require_writable, write_result

    if output is not None:
        require_writable(output, force=force)
    measured = None
    if results:
        read = {str(path): read_result(path) for path in results}
        measured = collect(read, candidate=candidate, model=model, framework=framework)
    known = measured.labels.get("parameters") if measured is not None else None
    given = _make_given(options, known)
    prediction = predict_points(measured, given, workers, uncertainty=uncertainty)
    settings = {
        "results": [str(path) for path in results],
        "model": model,
        "framework": framework,
        "candidate": candidate,
        "workers": workers,
        "uncertainty": uncertainty,
        **options,
    }
    result = describe(prediction, measured, settings)

    console = Console(highlight=False)
    console.print(_tabulate(result))
    for line in _explain(result, uncertainty):
        console.print(line, soft_wrap=True)
    if output is not None:
        write_result(output, result, force=force)
        console.print(f"Written to {output}", soft_wrap=True)


def _make_given(options: dict[str, Any], measured_parameters: int | None) -> Given:
    from hvdkit.errors import HvdkitError
    from hvdkit.profile.given import Given

    def scale(name: str, factor: float) -> float | None:
        value = options[name]
        return None if value is None else value * factor

    parameters, dtype_bytes = options["parameters"], options["dtype_bytes"]
    gradient_bytes = None
    if parameters is not None or dtype_bytes is not None:
        count = measured_parameters if parameters is None else parameters
        if count is None:
            raise HvdkitError("--dtype-bytes says nothing without --parameters")
        gradient_bytes = count * (4 if dtype_bytes is None else dtype_bytes)
    return Given(
        compute_s=options["step_time_s"],
        fixed_s=options["fixed_time_s"],
        within_latency_s=scale("intra_latency_us", 1e-6),
        within_bandwidth=scale("intra_bandwidth_gbytes_s", 1e9),
        between_latency_s=scale("latency_us", 1e-6),
        between_bandwidth=scale("bandwidth_gbit_s", 1e9 / 8),
        overlap=options["overlap"],
        straggler=options["straggler"],
        gradient_bytes=gradient_bytes,
        bucket_bytes=scale("bucket_size_mb", 1 << 20),
        batch=options["batch_size"],
        scaling=None if options["weak"] is None else "weak" if options["weak"] else "strong",
        workers_per_host=options["workers_per_host"],
        slots_per_host=options["slots_per_host"],
        algorithm=options["algorithm"],
        price_per_worker_hour=options["price_per_worker_hour"],
    )


def _tabulate(result: dict[str, Any]) -> Table:
    from rich.table import Table

    summary = result["summary"]
    batch, scaling = summary["model"]["batch"], summary["model"]["scaling"]
    whose = "each worker" if scaling == "weak" else "all workers"
    table = Table(title=f"Predicted, {scaling} scaling: a batch of {batch} for {whose}")
    priced = summary["model"]["price_per_worker_hour"] is not None
    headings = ["workers", "step", "efficiency", "samples/s", *(["cost/million"] if priced else [])]
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("binds")
    measured_s = {
        (row["workers"], row["samples_per_worker"]): row["step_time_s"]
        for row in summary["measured"]
    }
    if measured_s:
        table.add_column("measured step", justify="right")
    for point, series in zip(summary["points"], result["series"], strict=True):
        low, high = point["scaling_efficiency_low"], point["scaling_efficiency_high"]
        cells = [
            str(point["workers"]),
            f"{1e3 * point['step_time_s']:.4g} ms",
            f"{point['scaling_efficiency']:.1%} \\[{low:.1%}, {high:.1%}]",
            _show(point["samples_per_s"]),
        ]
        if priced:
            cells.append(_show(point["cost_per_million_samples"]))
        cells.append(point["binds"])
        where = point["workers"], series["labels"]["global_batch"] // point["workers"]
        if where in measured_s:
            cells.append(f"{1e3 * measured_s[where]:.4g} ms")
        table.add_row(*cells)
    return table


def _show(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _explain(result: dict[str, Any], uncertainty: float) -> list[str]:
    """Say what the numbers rest on, a line each."""
    summary = result["summary"]
    lines = [f"{what}: {origin}" for what, origin in summary["origins"].items()]
    if "given" in " ".join(summary["origins"].values()):
        lines.append(f"What is given may be wrong by {uncertainty:.0%} in the bands.")
    lines += [f"Assumed: {sentence}" for sentence in summary["assumptions"]]
    numbers = [row["workers"] for row in summary["points"] if row["basis"] == "extrapolated"]
    if numbers and summary["measured"]:
        lines.append(f"Extrapolated: {', '.join(map(str, numbers))} worker(s)")
    if summary["model"]["within"] is None and summary["model"]["between"] is None:
        lines.append(
            "One worker only: nothing says what an all-reduce costs; add a result of `hvdkit bench "
            "allreduce`, or give --intra-latency-us and --intra-bandwidth-gbytes-s, or "
            "--latency-us and --bandwidth-gbit-s."
        )
    elif summary["model"]["between"] is None:
        lines.append(
            "One host only: nothing says what the network between hosts costs; give --latency-us "
            "and --bandwidth-gbit-s."
        )
    return lines
