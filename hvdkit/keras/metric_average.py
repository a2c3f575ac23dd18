"""Average metrics at the end of each epoch, before any other callback reads them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import keras

from hvdkit.keras.backend import hvd
from hvdkit.keras.collectives import allgather_object
from hvdkit.keras.metrics import average_metrics

__all__ = ["MetricAverageCallback"]


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the logs of each epoch over all ranks, wherever this is in the list of callbacks.

    Means are weighted by the samples of the epoch as Keras's own loss counts them, and plain
    where a custom ``train_step`` leaves that loss out. All other callbacks see averaged logs, so
    that ``EarlyStopping`` and ``ReduceLROnPlateau`` decide alike on every rank. What callbacks
    before this one add to the logs is averaged too. Training that a callback ended on one rank
    ends on all.

    Args:
        device: Horovod's option; without effect.
        process_set: The ranks to average over.
    """

    def __init__(self, device: str = "", *, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.process_set = process_set
        self._averaged: dict[str, Any] | None = None
        self._trained: float | None = None
        self._validated: float | None = None
        _average_before_others()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget the samples of the epoch before."""
        self._trained = self._validated = None

    def on_test_begin(self, logs: Any = None) -> None:
        """Note the samples of training: validation resets what counts them."""
        if self._trained is None:
            self._trained = self._count_samples()

    def on_test_end(self, logs: Any = None) -> None:
        """Note the samples of validation."""
        self._validated = self._count_samples()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average in place what is not averaged yet: what other callbacks put into the logs."""
        if logs is None or not self.process_set.included():
            return
        before, self._averaged = self._averaged or {}, None
        logs |= self._average(
            {key: value for key, value in logs.items() if before.get(key, self) is not value}
        )

    def average_first(self, logs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the averaged logs of an epoch, before any callback has seen them."""
        self._averaged = _read_logs(logs or {})
        self._averaged |= self._average(self._averaged)
        return dict(self._averaged)

    def agree_to_stop(self) -> None:
        """End training on every rank if it ends on one."""
        stops = allgather_object(
            bool(self.model.stop_training), name="stop_training", process_set=self.process_set
        )
        self.model.stop_training = any(stops)

    def _average(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Average the numbers among logs; arrays and texts are left to each rank."""
        numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float))}
        validated = {key: value for key, value in numbers.items() if key.startswith("val_")}
        trained = {key: value for key, value in numbers.items() if key not in validated}
        counts = allgather_object(
            (self._count_samples() if self._trained is None else self._trained, self._validated),
            name="metric_average.samples",
            process_set=self.process_set,
        )
        mine = counts[self.process_set.rank()]
        averaged: dict[str, float] = {}
        for which, part in enumerate((trained, validated)):
            known = all(count[which] for count in counts)
            averaged |= average_metrics(part, mine[which] if known else None, self.process_set)
        return averaged

    def _count_samples(self) -> float | None:
        for metric in self.model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return float(keras.ops.convert_to_numpy(metric.count))
        return None


def _read_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs without nesting, numbers as Python's; Keras moves its own function for that."""
    read: dict[str, Any] = {}
    for key, value in sorted(logs.items()):
        if isinstance(value, Mapping):
            read |= _read_logs(value)
            continue
        if keras.ops.is_tensor(value):
            value = keras.ops.convert_to_numpy(value)
        # Arrays and texts stay what they are.
        with contextlib.suppress(TypeError, ValueError):
            value = float(value)
        read[key] = value
    return read


@functools.cache
def _average_before_others() -> None:
    """Let ``CallbackList`` average logs before it hands them out, whatever its order.

    Changes the class once; lists without a ``MetricAverageCallback`` behave as before.
    """
    cls: Any = keras.callbacks.CallbackList
    in_order = cls.on_epoch_end

    @functools.wraps(in_order)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        averaging = [
            callback
            for callback in self.callbacks
            if isinstance(callback, MetricAverageCallback) and callback.process_set.included()
        ]
        if not averaging:
            in_order(self, epoch, logs)
            return
        in_order(self, epoch, averaging[0].average_first(logs))
        averaging[0].agree_to_stop()

    cls.on_epoch_end = on_epoch_end
