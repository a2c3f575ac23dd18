"""What can be measured: models, frameworks, and the ways of reducing gradients in each.

A framework is a module with ``prepare``; it is loaded only in the worker that measures it, so
that no candidate pays for another's imports or threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CANDIDATES", "ENVIRONMENT", "FRAMEWORKS", "MODELS", "TIMEOUT_S", "Training", "prepare"]

# Three shapes that cost a data-parallel optimizer in different places: a few large tensors
# (bandwidth), many small ones (work per tensor), and a convolutional net (compute).
MODELS = ("mlp", "many-small", "cnn")

FRAMEWORKS = {
    "torch": "hvdkit.bench.torch_training",
    "tensorflow": "hvdkit.bench.tensorflow_training",
    "keras": "hvdkit.bench.keras_training",
}

# Each is compared with those after it; "single" never communicates: the limit.
CANDIDATES = {
    "torch": ("hvdkit", "horovod", "ddp", "single"),
    "tensorflow": ("hvdkit", "horovod", "mwms", "single"),
    "keras": ("hvdkit", "horovod", "mwms", "single"),
}

# Stock Horovod's C++ as it was before the edits that make it faster.
ENVIRONMENT = {
    "horovod": {
        "HOROVOD_FIXED_CYCLES": "1",
        "HOROVOD_SOCKETS_ONLY": "1",
        "HOROVOD_SPIN_WAIT": "1",
    }
}

# Candidates are suspended while another one runs; no collective may take that for a dead peer.
TIMEOUT_S = 3600


@dataclass
class Training:
    """A model that trains as one candidate does, on one fixed batch.

    Attributes:
        run: Trains for one untimed and then the given number of timed steps; returns the
            seconds of each. Collective, for a candidate that communicates.
        close: Ends communication.
        batch: Samples in a worker's batch.
        tensors: Trainable tensors of the model.
        parameters: Elements of these.
    """

    run: Callable[[int], list[float]]
    close: Callable[[], None]
    batch: int
    tensors: int
    parameters: int


def prepare(
    framework: str,
    candidate: str,
    model: str,
    *,
    rank: int,
    size: int,
    threads: int,
    folder: Path,
) -> Training:
    """Build ``model`` and make it train as ``candidate`` does.

    Collective: every rank must call, except for ``single``.

    Args:
        framework: One of ``FRAMEWORKS``.
        candidate: One of the framework's ``CANDIDATES``.
        model: One of ``MODELS``.
        rank: Of this process.
        size: Number of processes.
        threads: Compute threads of this process.
        folder: An empty one, the same for all ranks, to find each other.
    """
    module = importlib.import_module(FRAMEWORKS[framework])
    training: Training = module.prepare(
        candidate, model, rank=rank, size=size, threads=threads, folder=folder
    )
    return training
