"""Trains a model as one candidate does, a block of timed steps for each request."""

from __future__ import annotations

from hvdkit.bench.catalog import prepare
from hvdkit.bench.worker import make_parser, read_rank, serve

__all__: list[str] = []


def main() -> None:
    """Prepare what the arguments say, and time blocks of steps."""
    parser = make_parser(__doc__)
    for name in ("framework", "model"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    rank, size = read_rank()
    training = prepare(
        arguments.framework,
        arguments.candidate,
        arguments.model,
        rank=rank,
        size=size,
        threads=arguments.threads,
        folder=arguments.folder,
    )
    hello = {
        "batch": training.batch,
        "tensors": training.tensors,
        "parameters": training.parameters,
        "threads": arguments.threads,
    }
    serve(arguments.folder, hello, training.run)
    training.close()


if __name__ == "__main__":
    main()
