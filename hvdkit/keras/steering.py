"""Keras's own callbacks that steer the training do so alike on all ranks.

``EarlyStopping``, ``ReduceLROnPlateau`` and ``TerminateOnNaN`` decide by what their rank has
measured. One that ends training alone leaves the others waiting; one that lowers the rate alone
lets the replicas drift apart. Their classes are changed once, for models whose optimizer is
distributed; values that are equal on all ranks are left as they are.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdkit.agreement import format_ranks
from hvdkit.keras.backend import sum_array
from hvdkit.keras.collectives import allgather_object
from hvdkit.keras.distribution import Distribution, find_distribution

__all__ = ["steer_alike"]


@functools.cache
def steer_alike() -> None:
    """Let the three callbacks ask all ranks. Every rank must have them in its list."""
    _share_monitored(keras.callbacks.EarlyStopping)
    _share_monitored(keras.callbacks.ReduceLROnPlateau)
    _share_nan(keras.callbacks.TerminateOnNaN)


def _share_monitored(cls: Any) -> None:
    """Let a callback see the mean over ranks of the value that it monitors."""
    alone: Callable[..., Any] = cls.on_epoch_end

    @functools.wraps(alone)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        distribution = _find_shared(self)
        logs = {} if logs is None else logs
        if distribution is None:
            alone(self, epoch, logs)
            return
        own = logs.get(self.monitor)
        values = allgather_object(
            None if own is None else float(own),
            name=f"{cls.__name__}.monitored",
            process_set=distribution.options.process_set,
        )
        known = [value for value in values if value is not None]
        if own is not None and any(value != known[0] for value in known):
            logs[self.monitor] = statistics.fmean(known)
        try:
            alone(self, epoch, logs)
        finally:
            if own is not None:
                logs[self.monitor] = own  # other callbacks see what they would without this one

    cls.on_epoch_end = on_epoch_end


def _share_nan(cls: Any) -> None:
    """End training on every rank in the same batch, if the loss of one is not finite."""
    alone: Callable[..., Any] = cls.on_batch_end

    @functools.wraps(alone)
    def on_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        distribution = _find_shared(self)
        if distribution is None:
            alone(self, batch, logs)
            return
        process_set = distribution.options.process_set
        loss = (logs or {}).get("loss")
        mine = np.zeros(process_set.size(), np.int32)
        mine[process_set.rank()] = loss is not None and not math.isfinite(float(loss))
        bad = sum_array(mine, name="terminate_on_nan", process_set=process_set)
        ranks = [rank for rank, count in zip(process_set.ranks, bad, strict=True) if count]
        if not ranks:
            return
        if process_set.rank() == 0:
            print(
                f"\nThe loss of {format_ranks(ranks)} is not finite in batch {batch}: training ends"
            )
        alone(self, batch, {**(logs or {}), "loss": math.nan})

    cls.on_batch_end = on_batch_end


def _find_shared(callback: Any) -> Distribution | None:
    """Return the distribution of the model's optimizer, where there are others to ask."""
    distribution = find_distribution(getattr(callback.model, "optimizer", None))
    if distribution is None or distribution.alone:
        return None
    return distribution
