"""Learning rates for many workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvdkit.errors import HvdkitError
from hvdkit.schedule import scaling_factor

__all__ = ["multiply_rates", "scale_learning_rate", "warmup"]

# What a parameter group or a scheduler may hold that is a learning rate, or a list of them; not
# the floors of a scheduler (``eta_min``, ``min_lrs``), which say where to stop.
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


def scale_learning_rate(
    lr: float,
    rule: str = "linear",
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> float:
    """Scale a learning rate tuned for one worker to the effective batch.

    The effective batch grows with the workers and with the accumulated passes. With
    accumulation this is the rate for the *mean* over the passes: use
    ``average_aggregated_gradients=True`` or divide the loss by the passes.

    Args:
        lr: The rate that suits one worker's batch.
        rule: ``"linear"``, ``"sqrt"`` or ``"none"``; see ``hvdkit.schedule.scaling_factor``.
        backward_passes_per_step: As given to ``DistributedOptimizer``.
        process_set: The workers that train together.

    Raises:
        HvdkitError: If the rule is unknown.
    """
    return lr * scaling_factor(process_set.size() * backward_passes_per_step, rule)


def warmup(
    optimizer: torch.optim.Optimizer,
    steps: int,
    start_factor: float | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.lr_scheduler.LinearLR:
    """Return a scheduler that raises the learning rate evenly over the first steps.

    Step it once per optimizer step; ``SequentialLR`` joins it to another schedule.

    Args:
        optimizer: Its current rate is the one that is reached.
        steps: Optimizer steps until then; 0 means no warm-up.
        start_factor: The first rate as a part of the full one. By default 1 / workers: what a
            single worker would use, if the full rate was scaled linearly.
        process_set: The workers that train together.

    Raises:
        HvdkitError: If ``steps`` is negative.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), "gradual warmup".
    """
    if steps < 0:
        raise HvdkitError(f"a warm-up takes at least 0 steps, got {steps}")
    if start_factor is None:
        start_factor = 1 / process_set.size()
    if steps == 0:
        start_factor = 1.0  # LinearLR would stay at its first factor for ever
    return torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=start_factor, end_factor=1.0, total_iters=steps
    )


def multiply_rates(
    optimizer: torch.optim.Optimizer, factor: float, schedulers: Iterable[Any] = ()
) -> None:
    """Multiply the rate of every parameter group, and those that later rates are derived from.

    Args:
        optimizer: Changed in place.
        factor: By which.
        schedulers: Of this optimizer; also what a chain or a sequence of them holds.
    """
    for group in optimizer.param_groups:
        for key in _RATES_OF_GROUPS:
            value = group.get(key)
            if isinstance(value, torch.Tensor):
                value.mul_(factor)  # compiled steps hold this very tensor
            elif value is not None:
                group[key] = value * factor
    for scheduler in schedulers:
        for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
            for key in _RATES_OF_SCHEDULERS:
                if hasattr(part, key):
                    setattr(part, key, [rate * factor for rate in getattr(part, key)])
