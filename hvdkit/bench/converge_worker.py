"""Trains a small model to the end of its samples for each request; returns the curve."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from hvdkit.bench.tasks import iterate_batches, load
from hvdkit.bench.worker import Seat, read_arguments, serve

__all__: list[str] = []

# Framework -> its learner, and the adapter, which must be initialized first.
FRAMEWORKS = {
    "torch": ("hvdkit.bench.tasks.torch_learner", "hvdkit.torch"),
    "tensorflow": ("hvdkit.bench.tasks.keras_learner", "hvdkit.keras"),
}


def main() -> None:
    """Prepare what the arguments say, and train on request."""
    channel, seat, settings = read_arguments(__doc__)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    learner, adapter = FRAMEWORKS[settings["framework"]]
    hvd = importlib.import_module(adapter)
    hvd.init()
    hvd.set_threads(settings["threads"])
    make_learner = importlib.import_module(learner).Learner
    data = load(settings["task"])

    def answer(request: dict[str, Any]) -> dict[str, list[float]]:
        seed = request["seed"]
        learner = make_learner(hvd, settings["task"], data, request["learning_rate"], seed)
        return _train(learner, len(data.labels), request, seat)

    serve(channel, {}, answer)
    hvd.shutdown()


def _train(
    learner: Any, length: int, request: dict[str, Any], seat: Seat
) -> dict[str, list[float]]:
    """Return accuracy, samples seen by all workers, and seconds spent in steps, at each evaluation.

    Evaluating costs no time on this clock; the first step, in which a graph is traced, does.
    """
    batch = request["batch"]
    batches = iterate_batches(length, batch, rank=seat.rank, size=seat.size, seed=request["seed"])
    curve: dict[str, list[float]] = {"accuracy": [], "samples_seen": [], "time_s": []}
    seen, spent_s, due = 0, 0.0, request["every"]
    while seen < request["samples"]:
        start_s = time.perf_counter()
        learner.learn(next(batches))
        spent_s += time.perf_counter() - start_s
        seen += batch * seat.size
        if seen >= due:
            due += request["every"]
            # The others wait in their next step.
            accuracy = learner.evaluate() if seat.rank == 0 else 0.0
            for name, value in zip(curve, (accuracy, seen, spent_s), strict=True):
                curve[name].append(value)
    return curve


if __name__ == "__main__":
    main()
