"""What can be trained in a benchmark: frameworks, and the ways of reducing gradients in each.

A framework is a module with ``prepare``; it is loaded only in the worker that measures it, so
that no candidate pays for another's imports or threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdkit.bench.models import MODELS
from hvdkit.bench.settings import require_known
from hvdkit.bench.worker import Seat
from hvdkit.errors import HvdkitError

__all__ = [
    "CANDIDATES",
    "COMPRESSIONS",
    "DTYPES",
    "ENVIRONMENT",
    "FRAMEWORKS",
    "LEARNING_RATE",
    "Recipe",
    "Training",
    "prepare",
]

FRAMEWORKS = {
    "torch": "hvdkit.bench.torch_training",
    "tensorflow": "hvdkit.bench.tensorflow_training",
    "keras": "hvdkit.bench.keras_training",
    "keras-torch": "hvdkit.bench.keras_training",
}

# "single" never communicates: the limit.
CANDIDATES = {
    "torch": ("hvdkit", "horovod", "ddp", "single"),
    "tensorflow": ("hvdkit", "horovod", "mwms", "single"),
    "keras": ("hvdkit", "horovod", "mwms", "single"),
    "keras-torch": ("hvdkit", "horovod", "ddp", "single"),
}

# Stock Horovod's C++ as it was before the edits that make it faster.
ENVIRONMENT = {
    "horovod": {
        "HOROVOD_FIXED_CYCLES": "1",
        "HOROVOD_SOCKETS_ONLY": "1",
        "HOROVOD_SPIN_WAIT": "1",
    },
    # It would take a suspended worker for one that hangs.
    "ddp": {"TORCH_NCCL_ENABLE_MONITORING": "0"},
}

DTYPES = ("float32", "bfloat16", "float16")
COMPRESSIONS = ("none", "fp16", "bf16")
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        framework: One of ``FRAMEWORKS``.
        candidate: One of the framework's ``CANDIDATES``.
        model: One of ``MODELS``.
        batch: Samples a worker takes in one pass.
        threads: Compute threads a worker.
        dtype: One of ``DTYPES``, of parameters, activations and gradients.
        accumulate: Passes for each step of the optimizer.
        compression: One of ``COMPRESSIONS``: the dtype that gradients travel in.
        bucket_size_mb: Of gradients that travel together, in MiB; None for each one's default.
        input: Folder of images, CLASS/IMAGE; None for one batch of random numbers.
    """

    framework: str
    candidate: str
    model: str
    batch: int
    threads: int = 1
    dtype: str = "float32"
    accumulate: int = 1
    compression: str = "none"
    bucket_size_mb: float | None = None
    input: str | None = None

    def __post_init__(self) -> None:
        """Refuse what a candidate cannot do, before anything is started."""
        require_known("dtype", (self.dtype,), DTYPES)
        require_known("compression", (self.compression,), COMPRESSIONS)
        problem = _find_problem(self)
        if problem:
            raise HvdkitError(problem)


def _find_problem(recipe: Recipe) -> str | None:
    who, framework = recipe.candidate, recipe.framework
    fits = framework in ("keras", "keras-torch")
    if who == "single":
        return None
    if recipe.accumulate > 1 and (framework == "tensorflow" or (fits and who != "hvdkit")):
        return (
            f"{who} in {framework} has no accumulation here: a loop with a tape sums gradients "
            "itself; use --framework torch, or keras against single"
        )
    if recipe.compression != "none" and who == "mwms":
        return "mwms cannot compress gradients; leave it out, or --compression"
    if recipe.compression == "bf16" and (framework != "torch" or who == "horovod"):
        return f"{who} in {framework} has no bf16 compression; choose fp16"
    if recipe.dtype == "bfloat16" and who == "horovod" and framework in ("torch", "keras-torch"):
        return "stock Horovod has no bfloat16 in PyTorch; leave horovod out"
    if recipe.bucket_size_mb is not None and who == "mwms":
        return "mwms takes no bucket size; leave it out, or --bucket-size-mb"
    if recipe.input and fits:
        return (
            "--input needs the framework torch or tensorflow: fit draws its batches itself, so "
            "the wait for them cannot be told apart"
        )
    if recipe.input and MODELS[recipe.model].kind != "images":
        return f"--input holds images, and {recipe.model} takes {MODELS[recipe.model].kind}"
    return None


@dataclass
class Training:
    """A model that trains as one candidate does.

    Attributes:
        run: Trains for one untimed and then the given number of timed steps; returns series of
            samples by metric: ``step_s``, seconds of each step, and ``input_s``, how many of
            these it waited for batches, where there is an input. Collective, for a candidate that
            communicates.
        close: Ends communication.
        describe: Returns what is known after the steps, by name: ``device_peak_bytes``.
    """

    run: Callable[[int], dict[str, list[float]]]
    close: Callable[[], None]
    describe: Callable[[], dict[str, Any]] = dict


def prepare(recipe: Recipe, seat: Seat) -> Training:
    """Build the model and make it train as the recipe says.

    Collective: every rank must call, except for ``single``.
    """
    module = importlib.import_module(FRAMEWORKS[recipe.framework])
    training: Training = module.prepare(recipe, seat)
    return training
