"""What workers of elastic test jobs share: their orders, their doom, and what they report."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Doom", "Watch", "report"]

FIRST = 12  # as many samples as three workers have in their first step
HOST = os.environ.get("HOROVOD_HOSTNAME", "alone")


def die() -> NoReturn:
    """End this process as a lost machine does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing survives SIGKILL")


class Doom:
    """When and where the workers of a job are killed: ``HVDKIT_TEST_DOOM``, a JSON list.

    Each entry has ``host``, ``step`` (the first step of the whole run that it may happen in),
    ``moment`` (a name), and perhaps ``delay_s``, from the moment on.
    """

    def __init__(self) -> None:
        orders = json.loads(os.environ.get("HVDKIT_TEST_DOOM", "[]"))
        self._orders = [order for order in orders if order["host"] == HOST]

    def strikes(self, moment: str, step: int) -> None:
        """Die, if this is the moment."""
        for order in self._orders:
            if order["moment"] == moment and step >= order["step"]:
                delay_s = order.get("delay_s", 0)
                if not delay_s:
                    die()
                timer = threading.Timer(delay_s, die)
                timer.daemon = True
                timer.start()


class Watch:
    """Sees to it that every sample counts once an epoch.

    What is kept in the state: ``seen``, the samples of the epoch under way in the order in which
    all workers had them, ``epochs``, how many epochs were whole, and ``sizes``, the number of
    workers, each time that it changed.
    """

    step = 0  # for moments that do not know the state

    @staticmethod
    def initial() -> dict[str, Any]:
        """Return what a state begins with."""
        return {"seen": [], "epochs": 0, "sizes": [], "step": 0}

    @staticmethod
    def note(state: Any, samples: list[int], workers: int) -> None:
        """Note one step of all workers."""
        state.seen = [*state.seen, *samples]  # not in place: the last commit holds the old one
        state.step += 1
        if not state.sizes or state.sizes[-1] != workers:
            state.sizes = [*state.sizes, workers]

    @staticmethod
    def end_epoch(state: Any, length: int) -> None:
        """Demand that the epoch that ends had every sample once.

        Workers of another number than before may not go round at its end: up to one less than
        they are of its first samples come once more, in the last step.
        """
        counts = Counter(state.seen)
        again = [sample for sample, count in counts.items() for _ in range(count - 1)]
        wrong = {sample: counts[sample] for sample in range(length) if counts[sample] != 1}
        assert sorted(counts) == list(range(length)), f"missing in epoch {state.epochs}: {wrong}"
        assert len(again) < state.sizes[-1], f"more than once in epoch {state.epochs}: {wrong}"
        assert set(again) <= set(state.seen[:FIRST]) & set(state.seen[-FIRST:]), f"{wrong}"
        state.seen, state.epochs = [], state.epochs + 1


def report(name: str, **values: Any) -> None:
    """Write ``name``.json for the test that started the job, in one piece."""
    path = Path(os.environ["HVDKIT_TEST_RESULTS"], f"{name}.json")
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"pid": os.getpid(), "host": HOST, **values}), encoding="utf-8")
    part.rename(path)
