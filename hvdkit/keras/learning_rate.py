"""Callbacks that change the learning rate while ``fit`` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import hvd

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to ``initial_lr`` times ``multiplier`` in a range of epochs.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A function of the epoch, or a number, raised to the power of the epochs since
            ``start_epoch``.
        start_epoch: The first epoch of the range.
        end_epoch: The first epoch after it; None: no end.
        staircase: Change the rate at the start of each epoch; otherwise before each batch, and
            ``multiplier`` gets the epoch with its fraction.
        momentum_correction: Scale the optimizer's momentum with the rate, where it has the rate
            in it (SGD, RMSprop): past gradients then weigh like new ones.
        steps_per_epoch: Batches of an epoch, if ``fit`` does not know them beforehand.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), "momentum correction".
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many steps an epoch has."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise HvdkitError(
                f"{type(self).__name__} needs the steps of an epoch, which fit does not know "
                f"for this kind of data; pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this batch."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._set_rate(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the rate into the logs."""
        if logs is not None:
            logs["lr"] = self._read_rate()

    def _set_rate(self, epoch: float) -> None:
        old, new = self._read_rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            # Not the optimizer's momentum, as in Horovod: a compiled step has that as a constant.
            for slot in _find_momentum(self.model.optimizer):
                slot.assign(slot * (new / old))

    def _read_rate(self) -> float:
        return float(ops.convert_to_numpy(self.model.optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size()`` to ``initial_lr``, batch by batch.

    Args:
        initial_lr: The rate after the warm-up; for many workers, the scaled one.
        warmup_epochs: How many epochs it takes.
        momentum_correction: As for ``LearningRateScheduleCallback``.
        steps_per_epoch: As for ``LearningRateScheduleCallback``.
        verbose: 1: rank 0 prints a line at the end of it.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), "gradual warmup".
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            # The last batch of an epoch, not the one after it, has that epoch's round number.
            epoch += 1 / self.steps_per_epoch
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the rate into the logs, and say that the warm-up ended."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the warm-up ended at rate {self._read_rate():g}.")


def _find_momentum(optimizer: Any) -> list[Any]:
    """Return the variables that hold a momentum with the learning rate in it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, keras.optimizers.SGD):
        slots = getattr(inner, "momentums", [])
    elif isinstance(inner, keras.optimizers.RMSprop):
        slots = getattr(inner, "_momentums", [])
    else:
        slots = []
    return [slot for slot in slots if slot is not None]
