"""Horovod's elastic training for Keras models, on either backend."""

from __future__ import annotations

import importlib
from typing import Any

import keras
from horovod.common.elastic import ObjectState

from hvdkit.keras.backend import hvd
from hvdkit.keras.state import broadcast_initial_state

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

run = importlib.import_module(f"{hvd.__name__}.elastic").run


class KerasState(ObjectState):  # type: ignore[misc, unused-ignore]
    """A model, its optimizer and further values, kept and synchronized when ranks come and go.

    Args:
        model: A built Keras model.
        optimizer: By default the one that the model was compiled with.
        kwargs: Further values, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet; call it on a batch first")
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)  # or a restored step would keep slots
        self._save_variables()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        """Keep all values as they are."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Go back to the values that were kept."""
        for variable, value in self._saved_variables:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's values.

        Collective: every rank must call.
        """
        broadcast_initial_state(self.model, self.optimizer)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        variables = [*self.model.variables, *self.optimizer.variables]
        self._saved_variables = [(v, v.numpy().copy()) for v in variables]


class CommitStateCallback(keras.callbacks.Callback):
    """Commit ``state`` after every ``batches_per_commit`` batches and after each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from here: ranks that joined did not count the batches before."""
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Commit what the batches before this one left."""
        if self._batches == self.batches_per_commit:
            self.state.commit()
            self._batches = 0
        self._batches += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the epoch."""
        self.state.commit()
        self._batches = 0


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep the number of the last batch in ``state.batch``; 0 after each epoch.

    Keras 3 takes the length of an epoch from ``fit`` alone: to finish a broken one, pass it
    ``steps_per_epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Start over."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep the number of finished epochs, over all restarts, in ``state.epoch``."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras counts from 0 again after a restart."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
