"""The hyper-parameters of an optimizer, which must be the same on every rank."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.env import is_elastic
from hvdkit.hyper_parameters import list_values
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.layout import outside_of_functions

__all__ = ["agree_on_hyper_parameters", "describe_hyper_parameters"]


def describe_hyper_parameters(optimizer: Any) -> list[tuple[str, str]]:
    """List what the configuration of an optimizer says, as labels and texts.

    Without what is a variable, as the learning rate is unless it is a schedule: a broadcast makes
    that equal, and may do so after the first step. The first entry is the count of the others.

    Args:
        optimizer: One of Keras 3; of a ``LossScaleOptimizer``, what it holds.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    values = list_values(type(inner).__name__, _read_config(inner))
    return [("number of hyper-parameters", str(len(values))), *values]


def agree_on_hyper_parameters(optimizer: Any, name: str, process_set: Any) -> None:
    """Raise on every rank unless all have the same hyper-parameters.

    Called when the optimizer first reduces: inside of ``tf.function`` while it is traced. In an
    elastic job ranks compare when they synchronize their state.

    Collective: every rank of ``process_set`` must call.

    Raises:
        RankDisagreementError: Names the first that differs.
    """
    if is_elastic():
        return
    with outside_of_functions() as possible:
        if possible:
            demand_equal_entries(
                "The optimizer",
                describe_hyper_parameters(optimizer),
                name=f"{name}.hyper_parameters",
                process_set=process_set,
                advice="make it with the same arguments on every rank",
            )


def _read_config(optimizer: Any) -> dict[str, Any]:
    try:
        config = dict(optimizer.get_config())
    except Exception:  # one's own class need not have one
        return {}
    if not isinstance(
        getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule
    ):
        config.pop("learning_rate", None)
    return {key: _drop_names(value) for key, value in config.items() if key != "name"}


def _drop_names(value: Any) -> Any:
    """Leave out names, which change no number, and optimizers within."""
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("config"), dict) and "learning_rate" in value["config"]:
        return {}
    return {key: _drop_names(item) for key, item in value.items() if key != "name"}
