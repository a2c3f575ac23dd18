"""Go back to the last good checkpoint, with a lower learning rate."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import hvd
from hvdkit.keras.checkpoint import CheckpointStore, restore_from
from hvdkit.keras.collectives import share_errors
from hvdkit.keras.distribution import list_steppers
from hvdkit.rollback import demand_lowering_factor, load_newest_good

__all__ = ["demand_settable_rate", "lower_learning_rate", "roll_back"]


def roll_back(
    store: CheckpointStore,
    model: Any,
    optimizer: Any = None,
    learning_rate_factor: float = 1.0,
    process_set: Any = hvd.global_process_set,
) -> dict[str, Any]:
    """Restore the newest good checkpoint on all ranks and multiply the learning rate.

    A checkpoint is good if it is whole and its trainable variables are finite; others are
    passed over with a warning. The first rank of ``process_set`` reads the store.

    The rate stays lowered until something sets it anew, as ``LearningRateScheduler`` and
    hvdkit's own callbacks for the rate do.

    Collective: every rank of ``process_set`` must call, outside of ``tf.function``.

    Args:
        store: Holds checkpoints of ``model`` and ``optimizer``.
        model: Restored in place.
        optimizer: By default the one that the model was compiled with.
        learning_rate_factor: The rate, as restored, is multiplied by it.
        process_set: The ranks that go back together.

    Returns:
        What ``save`` was given as extra, and ``"step"``.

    Raises:
        HvdkitError: On every rank, if there is no good checkpoint, it does not fit, or the rate
            is a ``LearningRateSchedule``, which nothing can lower.
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    with share_errors("roll_back", process_set):
        demand_lowering_factor(learning_rate_factor)
        if learning_rate_factor != 1:
            demand_settable_rate(optimizer)
    restored = restore_from(
        lambda: load_newest_good(store, lambda saved: _find_fault(saved, model)),
        model,
        optimizer,
        process_set.ranks[0],
        process_set,
    )
    assert restored is not None
    lower_learning_rate(optimizer, learning_rate_factor)
    return restored


def lower_learning_rate(optimizer: Any, factor: float) -> None:
    """Multiply the learning rate of an optimizer, and of each one that it holds."""
    demand_lowering_factor(factor)
    if factor == 1:
        return
    for one in list_steppers(optimizer):
        rate = float(keras.ops.convert_to_numpy(one.learning_rate))
        one.learning_rate = rate * factor


def demand_settable_rate(optimizer: Any) -> None:
    """Raise HvdkitError unless the learning rate can be multiplied."""
    for one in list_steppers(optimizer):
        if isinstance(one._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            raise HvdkitError(
                f"the learning rate is a {type(one._learning_rate).__name__}, which compiled steps "
                "hold and nothing can lower: use learning_rate_factor=1, or a callback that sets "
                "the rate instead of the schedule"
            )


def _find_fault(saved: dict[str, Any], model: Any) -> str | None:
    """Say why a whole checkpoint is not good."""
    for part in ("model", "optimizer"):
        if saved[part] is None:
            return f"it was saved without the {part}"
    trainable = {id(variable) for variable in model.trainable_variables}
    for variable, (name, _, array) in zip(model.variables, saved["model"], strict=False):
        # Where the two do not match, restoring says so.
        if id(variable) in trainable and not np.isfinite(array).all():
            return f"variable {name} is not finite in it"
    for name, _, array in saved["optimizer"]:
        if array.dtype.kind not in "iub" and np.isnan(array).any():
            return f"the optimizer's {name} holds NaN in it"
    return None
