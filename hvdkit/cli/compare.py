"""``hvdkit compare``: whether a result is worse than another."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["compare"]

REGRESSION, NOT_COMPARABLE = 1, 3
FILE = click.Path(path_type=Path)
# Labels that follow from the model, the workers and the scaling.
FOLLOWING = {"batch", "global_batch", "parameters", "tensors"}


@click.command()
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.05,
    show_default=True,
    help="The share by which a median may be worse.",
)
@click.option("--force", is_flag=True, help="Compare what was measured under other conditions.")
def compare(before: Path, after: Path, tolerance: float, force: bool) -> None:
    """Compare the result AFTER with BEFORE, the reference.

    What took turns with the candidate "single", which trains without communication, is held against
    it round by round, so that a slower machine is not taken for a regression.

    Exit status: 0 when nothing got worse, 1 for a regression, 3 where the results may not be
    compared or hold too few rounds.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hvdkit.errors import HvdkitError
    from hvdkit.results.comparison import MIN_ROUNDS, compare_results, find_mismatches
    from hvdkit.results.files import read_result

    try:
        results = read_result(before), read_result(after)
    except HvdkitError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(NOT_COMPARABLE) from None
    mismatches = find_mismatches(*results)
    comparisons = compare_results(*results, tolerance=tolerance)
    if not comparisons and not mismatches:
        mismatches = ["nothing: no series of theirs has a ratio"]
    if mismatches and not (force and comparisons):
        click.echo("These results may not be compared; they differ in", err=True)
        for line in mismatches:
            click.echo(f"  {line}", err=True)
        if comparisons:
            click.echo("--force compares them all the same.", err=True)
        raise SystemExit(NOT_COMPARABLE)

    table = Table(title="Cost after / before (above 1: worse), with 80 % bootstrap intervals")
    for heading in ("metric", "of", "before", "after", "ratio", "verdict"):
        table.add_column(heading)
    # What is the same in all rows is not worth a column.
    labels = [dict(one.labels) for one in comparisons]
    shared = {name for name in labels[0] if all(one.get(name) == labels[0][name] for one in labels)}
    hidden = shared | FOLLOWING if any("model" in one for one in labels) else shared
    for one, names in zip(comparisons, labels, strict=True):
        what = ", ".join(f"{name} {names[name]}" for name in names if name not in hidden)
        ratio = f"{one.ratio.estimate:.3f} [{one.ratio.low:.3f}, {one.ratio.high:.3f}]"
        table.add_row(
            escape(one.metric),
            escape(what),
            f"{one.before:.4g}",
            f"{one.after:.4g}",
            ratio,
            one.verdict,
        )
    console = Console(highlight=False)
    console.print(table)
    verdicts = {one.verdict for one in comparisons}
    if "pace" in verdicts:
        console.print("pace: of the machine, by single; ratios of the others are relative to it")
    if "regression" in verdicts:
        console.print("regression")
        raise SystemExit(REGRESSION)
    if "not enough data" in verdicts:
        console.print(
            f"not enough data: at least {MIN_ROUNDS} rounds are needed in each result (--repeats)"
        )
        raise SystemExit(NOT_COMPARABLE)
    console.print("fine")
