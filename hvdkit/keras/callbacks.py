"""Callbacks for ``fit`` on many ranks, by the names that ``horovod.tensorflow.keras`` has.

Whatever communicates does so in ``on_train_batch_begin`` or at the ends of epochs: Keras may run
``on_train_batch_end`` in a thread, out of step with the other ranks.
"""

from __future__ import annotations

from typing import Any

import keras

from hvdkit import trace
from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError
from hvdkit.events import EventLog
from hvdkit.keras.backend import hvd
from hvdkit.keras.checkpoint import CheckpointStore
from hvdkit.keras.checkpoint_callback import CheckpointCallback
from hvdkit.keras.collectives import gather_over
from hvdkit.keras.health_callback import HealthCallback
from hvdkit.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdkit.keras.metric_average import MetricAverageCallback
from hvdkit.keras.replica_check import ReplicaCheck
from hvdkit.keras.state import broadcast_initial_state
from hvdkit.replica_check import DEFAULT_STEPS

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CheckpointCallback",
    "HealthCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ReplicaCheckCallback",
    "rank_zero",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give every rank the variables of the root, of the model and its optimizer, once.

    Before the first batch; a model that has no variables until then, after it.

    Args:
        root_rank: The rank that the others copy.
        device: Horovod's option; variables stay where they are.
        local_variables: A variable or several that stay as they are on each rank.
        process_set: The ranks that take part.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Any = None,
        *,
        process_set: Any = hvd.global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.process_set = process_set
        self.broadcast_done = False
        several = isinstance(local_variables, (list, tuple, set))
        self._local_variables: list[Any] = (
            []
            if local_variables is None
            else list(local_variables)
            if several
            else [local_variables]
        )

    def register_local_var(self, var: Any) -> None:
        """Leave one more variable as it is on each rank."""
        self._local_variables.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if the model has its variables."""
        # Not in init(): TensorFlow's threads could not be set after a first operation.
        if not trace.is_on() and self.process_set.size() == hvd.size():
            trace.start(hvd.rank(), hvd.size(), "keras", gather_over(hvd.global_process_set))
        self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast if the first batch made the variables."""
        trace.end_step()  # steps that `hvdkit profile` sees last from batch to batch
        self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Broadcast after an epoch of a single batch."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self.broadcast_done and self.model.built and self.process_set.included():
            broadcast_initial_state(
                self.model,
                root_rank=self.root_rank,
                process_set=self.process_set,
                local_variables=self._local_variables,
            )
            self.broadcast_done = True


class ReplicaCheckCallback(keras.callbacks.Callback):
    """Compares the replicas every so many batches; see ``ReplicaCheck``.

    Of the model and its optimizer, to the last bit. By default ``ReplicaMismatchError`` is raised
    on every rank as soon as a check finds a difference.

    Args:
        steps: Training batches between two checks, each of which reads everything once. Batches
            are counted over all calls of ``fit``.
        buffers: Compare the other variables as well; see ``check_replicas``.
        process_set: The ranks to compare.
        on_mismatch: ``"raise"``, ``"resync"`` or ``"rollback"``; see ``ReplicaCheck``.
        store: For ``"rollback"``; holds checkpoints of the model and its optimizer. The count of
            epochs goes on.
        events: Where a mismatch is told, beside Python logging, by the first rank.

    Attributes:
        check: The ``ReplicaCheck``.
    """

    def __init__(
        self,
        steps: int = DEFAULT_STEPS,
        buffers: bool = False,
        process_set: Any = hvd.global_process_set,
        *,
        on_mismatch: str = "raise",
        store: CheckpointStore | None = None,
        events: EventLog | None = None,
    ) -> None:
        super().__init__()
        self.check = ReplicaCheck(
            None,
            steps=steps,
            buffers=buffers,
            on_mismatch=on_mismatch,
            store=store,
            events=events,
            process_set=process_set,
        )
        self._pending = False

    def set_model(self, model: Any) -> None:
        """Compare this model from here on."""
        super().set_model(model)
        self.check.watch(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """In an elastic job count from here: ranks that joined did not count the batches before."""
        self._pending = False
        if is_elastic():
            self.check.restart()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count, and perhaps check, what the batch before this one left."""
        self._count()
        self._pending = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count, and perhaps check, what the last batch left."""
        self._count()

    def _count(self) -> None:
        if self._pending:
            self._pending = False
            self.check.step()


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ``ModelCheckpoint`` that keeps the best model only, and writes on rank 0 only.

    Args:
        monitor: As for ``keras.callbacks.ModelCheckpoint``, as are the others.
        filepath: Where to write. As in Horovod, the attribute may be set later.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        filepath: Any = None,
    ) -> None:
        super().__init__(
            # Keras wants a path at once.
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Demand a path."""
        if self.filepath is None:
            raise HvdkitError("BestModelCheckpoint has no filepath; pass one or set the attribute")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write, on rank 0, if ``save_freq`` batches have passed."""
        if hvd.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write on rank 0 if the model is the best so far."""
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)


# Callbacks that communicate, or that steer the training and have to do so on every rank.
_FOR_EVERY_RANK = (
    BroadcastGlobalVariablesCallback,
    CheckpointCallback,
    HealthCallback,
    LearningRateScheduleCallback,
    MetricAverageCallback,
    ReplicaCheckCallback,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


def rank_zero(value: Any) -> Any:
    """Return what only rank 0 should pass to ``fit``: its verbosity, or callbacks that write files.

    ``fit(..., verbose=rank_zero(1), callbacks=[*..., *rank_zero([ModelCheckpoint(path)])])``

    Args:
        value: A verbosity, a callback, or a list of callbacks.

    Returns:
        ``value`` on rank 0; on the others 0, a callback that does nothing, or an empty list.

    Raises:
        HvdkitError: On every rank, for a callback that every rank needs, such as
            ``EarlyStopping``.
    """
    several = isinstance(value, (list, tuple))
    for callback in value if several else [value]:
        if isinstance(callback, _FOR_EVERY_RANK):
            raise HvdkitError(
                f"{type(callback).__name__} acts on the training: give it to every rank, and only "
                f"callbacks that write or print to rank_zero"
            )
    if hvd.rank() == 0:
        return value
    if several:
        return type(value)()
    return keras.callbacks.Callback() if isinstance(value, keras.callbacks.Callback) else 0
