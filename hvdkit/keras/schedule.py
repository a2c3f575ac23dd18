"""Learning rates for many workers."""

from __future__ import annotations

from typing import Any

from hvdkit.keras.backend import hvd
from hvdkit.schedule import scaling_factor

__all__ = ["scale_learning_rate"]


def scale_learning_rate(
    lr: float,
    rule: str = "linear",
    backward_passes_per_step: int = 1,
    process_set: Any = hvd.global_process_set,
) -> float:
    """Scale a learning rate tuned for one worker to the effective batch.

    Args:
        lr: The rate that suits one worker's batch.
        rule: ``"linear"``, ``"sqrt"`` or ``"none"``; see ``hvdkit.schedule.scaling_factor``.
        backward_passes_per_step: Passes that accumulate into one update, by their mean.
        process_set: The workers that train together.

    Raises:
        HvdkitError: The rule is unknown.
    """
    return lr * scaling_factor(process_set.size() * backward_passes_per_step, rule)
