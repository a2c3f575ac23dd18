"""``HealthCallback``: a health monitor in ``fit``."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.keras.health import HealthMonitor

__all__ = ["HealthCallback"]


class HealthCallback(keras.callbacks.Callback):
    """Watch training in ``fit`` with a ``HealthMonitor``, which says what is looked for.

    The step is compiled anew with the look at gradients in it. Every rank must have the callback.
    Callbacks that evaluate at the end of an epoch come after it in the list: they would leave the
    losses of what they evaluate in place of the last batch's.

    Args:
        options: Those of ``HealthMonitor``, from ``nonfinite`` on.

    Attributes:
        monitor: Of the ``fit`` under way, or the last one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.monitor: HealthMonitor | None = None
        self._options = options
        self._steps = 0
        self._totals = (0.0, 0.0)
        self._loss: float | None = None  # of the last batch, read before validation

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the monitor, and let the step be compiled with it."""
        self.monitor = HealthMonitor(self.model, **self._options)
        self._steps, self._totals, self._loss = 0, (0.0, 0.0), None
        self.model.make_train_function(force=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Let go of the optimizer."""
        if self.monitor is not None:
            self.monitor.guard.detach(self.model.optimizer)
            self.model.train_function = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Look at the batch before this one: here all ranks are in step."""
        self._look()
        self._steps += 1

    def on_test_begin(self, logs: Any = None) -> None:
        """Read the loss of the last batch, before validation sums up its own in that place.

        No more: perhaps only some ranks validate.
        """
        if self._steps:
            self._loss = self._read_loss()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Look at the last batch."""
        self._look()
        self._totals = (0.0, 0.0)

    def _look(self) -> None:
        assert self.monitor is not None
        if self._steps:
            self._steps = 0
            loss = self._read_loss() if self._loss is None else self._loss
            self._loss = None
            self.monitor.end_step(loss)

    def _read_loss(self) -> float | None:
        """Return the loss of the last batch, from what Keras sums up over the epoch."""
        for metric in self.model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                total = float(keras.ops.convert_to_numpy(metric.total))
                count = float(keras.ops.convert_to_numpy(metric.count))
                before, self._totals = self._totals, (total, count)
                if count > before[1]:
                    return (total - before[0]) / (count - before[1])
        return None
