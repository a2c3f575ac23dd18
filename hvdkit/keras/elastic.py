"""Horovod's elastic training for Keras models, on either backend."""

from __future__ import annotations

from typing import Any

import keras
from horovod.common.elastic import run_fn

from hvdkit.elastic import restart
from hvdkit.keras.backend import hvd
from hvdkit.keras.elastic_parts import ElasticParts, raise_losses
from hvdkit.keras.elastic_shard import ElasticShard
from hvdkit.keras.state import broadcast_initial_state

__all__ = [
    "CommitStateCallback",
    "ElasticShard",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "UpdateShardCallback",
    "run",
]


def run(func: Any) -> Any:
    """Decorate a training function so that it goes on when workers come or go.

    ``func(state, ...)`` is called again after each change, with the state of the last commit
    where a worker was lost, and with that of the moment where one came or left in good order.
    Collectives belong into it, none before it: who joins would run them alone.

    Args:
        func: Takes a state first, a ``KerasState`` for example.
    """
    return run_fn(raise_losses(func), lambda: restart(hvd.shutdown, hvd.init))


class KerasState(ElasticParts):
    """A model, its optimizer and further values, kept and synchronized when ranks come and go.

    Args:
        model: A built Keras model.
        optimizer: By default the one that the model was compiled with.
        learning_rate_rule: What the learning rate does when the workers change: ``"none"``
            leaves it alone, as Horovod does; ``"linear"`` and ``"sqrt"`` scale it with the batch
            of a step. The rate of now is that for the workers of now.
        keep_global_batch: Change how many passes make up a step, so that workers times passes
            stays as near as it can to what it is now. Needs an optimizer that accumulates and
            takes the mean; commit after whole steps.
        kwargs: Further values, which become attributes. An ``ElasticShard`` is kept by its
            position; others are kept as they are, so replace lists rather than change them.

    Raises:
        HvdkitError: If the rule is unknown or cannot be followed, or the optimizer does not
            accumulate.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        learning_rate_rule: str = "none",
        keep_global_batch: bool = False,
        **kwargs: Any,
    ) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet; call it on a batch first")
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)  # or a restored step would keep slots
        self._save_variables()
        values = self._adopt(self.optimizer, learning_rate_rule, keep_global_batch, kwargs)
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **values)

    def save(self) -> None:
        """Keep all values as they are."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Go back to the values that were kept."""
        for variable, value in self._saved_variables:
            variable.assign(value)
        super().restore()

    @raise_losses
    def sync(self) -> None:
        """Take over rank 0's values, and count them as kept.

        Collective: every rank must call.
        """
        broadcast_initial_state(self.model, self.optimizer)
        super().sync()

    def _save_variables(self) -> None:
        variables = [*self.model.variables, *self.optimizer.variables]
        self._saved_variables = [(v, v.numpy().copy()) for v in variables]


class UpdateShardCallback(keras.callbacks.Callback):
    """Advance a shard with every batch of ``fit``.

    Args:
        shard: Whose ``rest()`` is trained on, in its order: ``fit(..., shuffle=False)``.
        batch_size: As given to ``fit``, or to ``batch()`` of a ``tf.data.Dataset``.
    """

    def __init__(self, shard: ElasticShard, batch_size: int) -> None:
        super().__init__()
        self.shard = shard
        self.batch_size = batch_size

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self.shard.advance(min(self.batch_size, len(self.shard)))


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
