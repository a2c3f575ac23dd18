"""Show what several runs of the digits examples came to, as one table.

python examples/torch/digits.py --summary torch.json
python examples/tensorflow/digits_keras.py --summary keras.json
python examples/side_by_side.py torch.json keras.json
"""

import json
import statistics
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table


@click.command()
@click.argument(
    "summaries",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
def main(summaries: tuple[Path, ...]) -> None:
    """Print a row for each of SUMMARIES: the last epoch, and the median speed of all."""
    table = Table(title="side by side")
    table.add_column("framework")
    for name in ("loss", "held-out accuracy", "samples/s"):
        table.add_column(name, justify="right")
    for path in summaries:
        run = json.loads(path.read_text(encoding="utf-8"))
        last = run["epochs"][-1]
        speed = statistics.median(epoch["samples_per_s"] for epoch in run["epochs"])
        table.add_row(
            run["framework"], f"{last['loss']:.4f}", f"{last['accuracy']:.4f}", f"{speed:.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
