"""Small tasks that reach a known accuracy in seconds: what convergence is measured on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.sharding import order_epoch

__all__ = ["CONTEXT", "TASKS", "Data", "Task", "iterate_batches", "load"]


@dataclass(frozen=True)
class Task:
    """A data set and what is expected on it.

    Attributes:
        target: Accuracy on held-out samples, unless told otherwise.
        batch: Samples a step of one worker.
        learning_rate: For that batch.
        samples: To train on before giving up.
        every: Samples between evaluations.
    """

    target: float
    batch: int
    learning_rate: float
    samples: int
    every: int


TASKS = {
    # 1,437 images of 8 x 8 pixels to train on; 20 passes.
    "digits": Task(target=0.95, batch=32, learning_rate=0.05, samples=28_740, every=720),
    # The next byte of Python's documentation from the 16 before it.
    "text": Task(target=0.45, batch=64, learning_rate=0.2, samples=192_000, every=9_600),
}
CONTEXT = 16


@dataclass(frozen=True)
class Data:
    """Numpy arrays: float32 or int32 inputs, int64 labels, one row a sample."""

    inputs: Any
    labels: Any
    held_out_inputs: Any
    held_out_labels: Any


def load(name: str) -> Data:
    """Load a task's data; nothing is downloaded.

    Raises:
        HvdkitError: scikit-learn, which has the digits, is missing.
    """
    inputs, labels = _LOADERS[name]()
    held_out = slice(0, None, 5)
    kept = [index for index in range(len(labels)) if index % 5]
    return Data(inputs[kept], labels[kept], inputs[held_out], labels[held_out])


def _load_digits() -> tuple[Any, Any]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise HvdkitError(
            "the digits come with scikit-learn, which is not installed; run: pip install "
            "scikit-learn, or choose --task text"
        ) from None
    digits = load_digits()
    return (digits.data / 16).astype("float32"), digits.target.astype("int64")


def _load_text() -> tuple[Any, Any]:
    from pydoc_data.topics import topics

    import numpy

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = numpy.frombuffer(text, numpy.uint8)
    rows = numpy.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)[:: CONTEXT // 2]
    return rows[:, :-1].astype("int32"), rows[:, -1].astype("int64")


_LOADERS = {"digits": _load_digits, "text": _load_text}


def iterate_batches(length: int, batch: int, *, rank: int, size: int, seed: int) -> Iterator[Any]:
    """Yield the indices of this rank's part of each global batch, without end.

    Together the ranks take the samples in the order in which one process would with a batch
    ``size`` times as large; an epoch's last samples that fill no global batch are left out.

    Args:
        length: Of the data set.
        batch: Samples of each rank a step.
        rank: Of this process.
        size: Number of processes.
        seed: Of the order.
    """
    global_batch = batch * size
    if global_batch > length:
        raise HvdkitError(
            f"a batch of {batch} for each of {size} workers is more than the {length} samples "
            "that there are; choose a smaller --batch-size"
        )
    epoch = 0
    while True:
        order = order_epoch(length, seed=seed, epoch=epoch)
        for start in range(0, length - global_batch + 1, global_batch):
            first = start + rank * batch
            yield order[first : first + batch]
        epoch += 1
