"""Trains a model as one candidate does, a block of timed steps for each request."""

from __future__ import annotations

import timeit

from hvdkit.bench.catalog import Recipe, prepare
from hvdkit.bench.timing import time_steps
from hvdkit.bench.worker import read_arguments, serve

__all__: list[str] = []

NO_STEPS = 1000


def main() -> None:
    """Prepare what the arguments say, and time blocks of steps."""
    channel, seat, task = read_arguments(__doc__)
    training = prepare(Recipe(**task), seat)

    def answer(steps: int) -> dict[str, object]:
        return {"samples": training.run(steps), **training.describe()}

    # What the clock itself takes of a step: the loop around a step that does nothing.
    overhead_s = timeit.timeit(lambda: time_steps(_do_nothing, NO_STEPS), number=1) / NO_STEPS
    serve(channel, {"overhead_s": overhead_s}, answer)
    training.close()


def _do_nothing() -> None:
    pass


if __name__ == "__main__":
    main()
