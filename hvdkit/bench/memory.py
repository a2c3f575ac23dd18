"""What each replica of a model holds while it trains, and what a smaller batch would change.

Everything but the peak of a step is counted from the tensors themselves; the peak is measured on
one step, for two batches, of which the rest follows: it grows with the samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdkit.bench.models import MODELS
from hvdkit.bench.settings import require_known, require_positive
from hvdkit.errors import HvdkitError
from hvdkit.results.files import make_result, make_series

__all__ = [
    "FRAMEWORKS",
    "OPTIMIZERS",
    "Plan",
    "Replica",
    "Settings",
    "describe",
    "find_largest_batch",
    "make_replica",
    "measure",
    "plan_passes",
]

# Only the worker imports what a name stands for.
FRAMEWORKS = {"torch": "hvdkit.bench.torch_memory", "tensorflow": "hvdkit.bench.keras_memory"}
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        framework: A name from ``FRAMEWORKS``.
        model: A name from ``MODELS``, or MODULE:FUNCTION, which returns a model.
        loss: MODULE:FUNCTION, called with the model and a number of samples, which returns the
            loss of a batch of its own making; None for a model of the benchmarks.
        optimizer: A name from ``OPTIMIZERS``, or MODULE:FUNCTION, called with the parameters
            (PyTorch) or with nothing (Keras), which returns an optimizer.
        batch: Samples a worker takes in one pass; None for the benchmark's own.
        bucket_bytes: Gradients of less than half of it share a buffer.
    """

    framework: str = "torch"
    model: str = "mlp"
    loss: str | None = None
    optimizer: str = "sgd"
    batch: int | None = None
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        """Refuse names that do not exist, and a model of one's own without a loss."""
        require_known("framework", (self.framework,), FRAMEWORKS)
        if ":" not in self.optimizer:
            require_known("an optimizer, if not MODULE:FUNCTION,", (self.optimizer,), OPTIMIZERS)
        if ":" in self.model:
            if self.loss is None or self.batch is None:
                raise HvdkitError(
                    "a model of your own needs --loss MODULE:FUNCTION, called with the model and "
                    "the number of samples, and --batch-size"
                )
        else:
            require_known("a model, if not MODULE:FUNCTION,", (self.model,), MODELS)
            if self.batch is None:
                object.__setattr__(self, "batch", MODELS[self.model].batch)
        require_positive(self, "batch", "bucket_bytes")


@dataclass(frozen=True)
class Replica:
    """What one worker holds, in bytes.

    Attributes:
        parameters: Trainable or not.
        buffers: Batch-norm statistics and the like.
        gradients: Of the trainable parameters, in the buffers that are reduced.
        reduction: What reducing them takes besides.
        optimizer: Its state.
        step_fixed: What else a step needs at its peak, whatever the batch.
        step_per_sample: The same, of each sample.
        activations: Of all that, what the forward pass keeps for the backward pass, of ``batch``.
        batch: Samples of the measured step.
        device: Where it was measured.
        available: Memory of that device; None if unknown.
        peak_measured: Whether the peak of a step was, or the activations alone are counted.
    """

    parameters: int
    buffers: int
    gradients: int
    reduction: int
    optimizer: int
    step_fixed: int
    step_per_sample: float
    activations: int
    batch: int
    device: str
    available: int | None
    peak_measured: bool

    @property
    def parts(self) -> dict[str, int]:
        """What the batch takes a share of and what not, by names for people; they add up."""
        step = self.total(self.batch) - self.lasting
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "gradients": self.gradients,
            "reduction": self.reduction,
            "optimizer state": self.optimizer,
            "activations": min(self.activations, step),
            "else at the peak of a step": max(0, step - self.activations),
        }

    @property
    def lasting(self) -> int:
        """What is there in every step, whatever the batch."""
        held = self.parameters + self.buffers + self.gradients + self.optimizer
        return held + self.reduction

    def total(self, samples: int) -> int:
        """Return all that a worker holds at the peak of a step."""
        return round(self.lasting + self.step_fixed + self.step_per_sample * samples)


@dataclass(frozen=True)
class Plan:
    """One way to take the same samples in a step.

    Attributes:
        passes: Backward passes that are accumulated.
        samples: Of each.
        total_bytes: Of a replica.
        fits: Whether that fits; None if the size of the device is unknown.
    """

    passes: int
    samples: int
    total_bytes: int
    fits: bool | None


def measure(settings: Settings) -> Replica:
    """Measure in a process of its own, so that nothing else is counted and no noise is seen.

    Raises:
        HvdkitError: The model cannot be imported, built or trained for a step; with the last line
            of what the process said.
    """
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"} | dict(os.environ)
    if settings.framework == "tensorflow":
        environment["KERAS_BACKEND"] = "tensorflow"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "hvdkit.bench.memory_worker"),
                *("--settings", json.dumps(asdict(settings)), "--answer", str(answer)),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0 or not answer.exists():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            _, own, message = lines[-1].partition(f"{HvdkitError.__module__}.HvdkitError: ")
            if own:
                raise HvdkitError(message)
            killed = " (it was killed: out of memory?)" if done.returncode == -9 else ""
            raise HvdkitError(f"a step of {settings.model} failed{killed}: {lines[-1]}")
        return make_replica(json.loads(answer.read_text(encoding="utf-8")))


def make_replica(counted: Mapping[str, Any]) -> Replica:
    """Make an account of what the worker counted.

    Args:
        counted: Fields of ``Replica`` of the same names, and ``peaks``: bytes beyond what lasts at
            the peak of a step, as [samples, bytes] of two numbers of samples.
    """
    (few, low), (many, high) = counted["peaks"]
    per_sample = max(0.0, (high - low) / (many - few))
    fixed = max(0, round(high - per_sample * many))
    names = Replica.__dataclass_fields__.keys() & counted.keys()
    return Replica(
        **{name: counted[name] for name in names},
        step_fixed=fixed,
        step_per_sample=per_sample,
    )


def plan_passes(replica: Replica, available_bytes: int | None) -> list[Plan]:
    """Return the batch in one pass, in two, four and so on, down to one sample a pass.

    Args:
        replica: As measured.
        available_bytes: What the device has for a replica; None if unknown.
    """
    plans = []
    passes = 1
    while True:
        samples = -(-replica.batch // passes)
        total = replica.total(samples)
        fits = None if available_bytes is None else total <= available_bytes
        plans.append(Plan(passes, samples, total, fits))
        if samples == 1:
            return plans
        passes *= 2


def find_largest_batch(replica: Replica, available_bytes: int) -> int | None:
    """Return the most samples of a pass that fit; 0 if none does, None if any number does."""
    room = available_bytes - replica.total(0)
    if room < 0:
        return 0
    return None if replica.step_per_sample == 0 else int(room / replica.step_per_sample)


def describe(
    settings: Settings, replica: Replica, plans: list[Plan], available_bytes: int | None
) -> dict[str, Any]:
    """Return a result of driver ``memory``: a series for each part, in bytes.

    Its summary has ``replica`` (all of ``Replica``), ``total_bytes``, ``available_bytes``, ``fits``
    and ``plans``.
    """
    labels = {
        "framework": settings.framework,
        "model": settings.model,
        "optimizer": settings.optimizer,
        "batch": settings.batch,
        "device": replica.device,
    }
    series = [
        make_series("replica_bytes", "B", [[[size]]], lower_is_better=True, part=part, **labels)
        for part, size in replica.parts.items()
    ]
    summary = {
        "replica": asdict(replica),
        "total_bytes": replica.total(replica.batch),
        "available_bytes": available_bytes,
        "fits": plans[0].fits,
        "plans": [asdict(plan) for plan in plans],
    }
    return make_result("memory", asdict(settings), series, summary)
