"""``CheckpointCallback``: checkpoints in ``fit``, from which the next ``fit`` goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdkit.errors import CheckpointError, HvdkitError
from hvdkit.keras.backend import hvd
from hvdkit.keras.checkpoint import CheckpointStore, restore_or_broadcast
from hvdkit.keras.collectives import allgather_object, share_errors
from hvdkit.keras.random_state import read_rank_state, set_rank_state
from hvdkit.keras.state import read_variable

__all__ = ["CheckpointCallback"]


@dataclass
class _Resume:
    """Where ``fit`` was, and what to restore there."""

    epoch: int
    batch: int  # that many batches of the epoch are done
    variables: list[tuple[Any, np.ndarray]]
    random: dict[str, Any]
    metrics: list[np.ndarray]  # of this rank; empty: they begin anew


class CheckpointCallback(keras.callbacks.Callback):
    """Save checkpoints while ``fit`` runs; at its start, go on from the newest one.

    ::

        store = hvd.CheckpointStore("checkpoints", asynchronous=True)
        save = hvd.callbacks.CheckpointCallback(store, every_steps=1000)
        model.fit(inputs, targets, shuffle=False, epochs=10, callbacks=[save, ...])

    When the same script is started again, ``fit`` begins with the epoch and the batch at which the
    newest checkpoint was saved, as if nothing had happened: weights, optimizer, seeds, metrics of
    the epoch and the random state of every rank are as they were. The batches of that epoch that
    were trained on are read, and left out; with another number of ranks, as many as hold the same
    samples, rounded down, and the metrics begin anew. With an empty store every rank gets rank
    0's initial state.

    Data must come in the same order again: arrays with ``shuffle=False`` (``hvd.shard`` has
    shuffled them, once), or a ``tf.data.Dataset`` that starts over in each epoch, without
    ``steps_per_epoch``. Pass what ``hvdkit.tensorflow.shard`` returned as ``share``, and its order
    is that of the epoch. Augmentation belongs into layers: what a thread draws ahead of training
    cannot be told. What other callbacks keep to themselves (``EarlyStopping``) begins anew.

    The model must be built. Every rank must have the callback, at the same place in the list.

    Args:
        store: Where to save; rank 0 writes.
        every_steps: Save every so many batches, and at the end of each epoch; None: only there.
            With accumulated gradients, after the next update.
        share: Its ``set_epoch`` is called before each epoch.
        monitor: The entry of an epoch's logs that is the score of the checkpoint at its end, such
            as ``"val_loss"``; of rank 0, or the mean with a ``MetricAverageCallback``.

    Attributes:
        restored: Where the last ``fit`` went on: ``{"step", "epoch", "batch"}``, steps being
            batches of all epochs; None: it started afresh.

    Raises:
        HvdkitError: ``every_steps`` is below 1; the data is not that of the checkpoint.
        CheckpointError: On every rank, RankDisagreementError on some: nothing can be restored or
            written; see ``CheckpointStore``.
    """

    def __init__(
        self,
        store: CheckpointStore,
        every_steps: int | None = None,
        share: Any = None,
        monitor: str | None = None,
    ) -> None:
        super().__init__()
        if every_steps is not None and every_steps < 1:
            raise HvdkitError(f"every_steps must be at least 1, or None; got {every_steps}")
        self.store = store
        self.every_steps = every_steps
        self.share = share
        self.monitor = monitor
        self.restored: dict[str, int] | None = None
        self._resume: _Resume | None = None
        self._train: Any = None  # Keras's function, while batches are left out
        self._begun = 0  # batches before this epoch
        self._epoch = 0
        self._batch = 0  # of this epoch, the one under way
        self._saved = 0  # batches until the last checkpoint
        self._due = False  # at the end of an epoch that stopped between two updates

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore, or give every rank the same start."""
        self._resume, self._begun, self._saved, self._due = None, 0, 0, False
        self.restored = None
        saved = restore_or_broadcast(self.store, self.model)
        if saved is None:
            return
        if "fit" not in saved:
            raise CheckpointError(
                f"the newest checkpoint in {self.store.directory} was not saved by a "
                "CheckpointCallback: give fit's checkpoints a directory of their own"
            )
        fit = saved["fit"]
        epoch, batch = fit["epoch"], fit["batch"] * len(fit["metrics"]) // hvd.size()
        self.restored = {"step": saved["step"], "epoch": epoch, "batch": batch}
        self._saved, self._begun = saved["step"], saved["step"] - batch
        # As Keras's own BackupAndRestore does; without it fit would start over.
        self.model._initial_epoch = epoch
        if batch:
            variables = [*self.model.variables, *self.model.optimizer.variables]
            kept = [(variable, read_variable(variable).copy()) for variable in variables]
            same = len(fit["metrics"]) == hvd.size()
            metrics = fit["metrics"][hvd.rank()] if same else []
            self._resume = _Resume(epoch, batch, kept, read_rank_state(self.model), metrics)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Choose the order of the epoch, and leave out what was trained on."""
        self._epoch, self._batch = epoch, 0
        self.model._initial_epoch = None  # for the next fit
        if self.share is not None:
            self.share.set_epoch(epoch)
        if self._resume is not None:
            if epoch != self._resume.epoch:
                raise HvdkitError(
                    f"fit starts with epoch {epoch}, the checkpoint is of epoch "
                    f"{self._resume.epoch}: leave out initial_epoch"
                )
            self._train = self.model.train_function
            self.model.train_function = self._leave_out

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Save what the batches before this one left, if it is time."""
        self._batch = batch
        if self._resume is not None:
            if batch < self._resume.batch:
                return
            self._end_resuming()
        done = self._begun + batch
        due = self.every_steps is not None and done - self._saved >= self.every_steps
        if (due or self._due) and self._is_updated():
            self._save(self._epoch, batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save what the epoch left."""
        if self._resume is not None:
            raise HvdkitError(
                f"epoch {epoch} has ended within the {self._resume.batch} batches that the "
                "checkpoint says were done: this is not the data, or not the batch size, of then"
            )
        steps = (self.params or {}).get("steps")
        self._begun += steps or self._batch + self.model.steps_per_execution
        if not self._is_updated():
            self._due = True
            return
        score = None
        if self.monitor is not None:
            score = (logs or {}).get(self.monitor)
            if score is None:
                raise HvdkitError(
                    f"the logs of epoch {epoch} have no {self.monitor!r} to score the checkpoint "
                    f"by; they have: {', '.join(sorted(logs or {}))}"
                )
        self._save(epoch + 1, 0, score)

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for the last checkpoint."""
        self.model._initial_epoch = None
        with self._share_errors():
            self.store.wait()

    def _save(self, epoch: int, batch: int, score: Any = None) -> None:
        metrics = [read_variable(variable).copy() for variable in self._list_metrics()]
        everyones = allgather_object(
            (read_rank_state(self.model), metrics),
            name="checkpoint_callback",
            process_set=hvd.global_process_set,
        )
        random, metrics = ([one[part] for one in everyones] for part in range(2))
        with self._share_errors():
            self.store.save(
                self._begun + batch,
                self.model,
                self.model.optimizer,
                score=score,
                random=random,
                fit={"epoch": epoch, "batch": batch, "metrics": metrics},
            )
        self._saved, self._due = self._begun + batch, False

    def _leave_out(self, data: Any) -> Any:
        """Stand in for Keras's function of a step: read the batches, and do nothing."""
        if hasattr(data, "__next__"):  # on TensorFlow; on PyTorch they have been read
            for index in range(self.model.steps_per_execution):
                try:
                    batch = next(data)
                except StopIteration:
                    break  # on_epoch_end tells
                if index == 0:
                    # TensorFlow makes the variables of metrics with the first step.
                    self.model._symbolic_build(data_batch=batch)
        self._set_metrics()
        return self.model.get_metrics_result()

    def _end_resuming(self) -> None:
        """Undo what callbacks did at batches that were left out."""
        assert self._resume is not None
        if self._batch != self._resume.batch:
            raise HvdkitError(
                f"the checkpoint is of batch {self._resume.batch}, and fit takes "
                f"{self.model.steps_per_execution} batches at a time, to {self._batch}: set "
                "steps_per_execution as it was"
            )
        self.model.train_function = self._train
        for variable, value in self._resume.variables:
            variable.assign(value)
        self._set_metrics()
        set_rank_state(self.model, self._resume.random)
        self._resume = None

    def _is_updated(self) -> bool:
        """Whether no gradient waits for others to be added: those are not saved of every rank."""
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        passes = getattr(optimizer, "gradient_accumulation_steps", None) or 1
        return passes == 1 or int(optimizer._iterations.numpy()) % passes == 0

    def _list_metrics(self) -> list[Any]:
        return [variable for metric in self.model.metrics for variable in metric.variables]

    def _set_metrics(self) -> None:
        assert self._resume is not None
        variables, values = self._list_metrics(), self._resume.metrics
        if len(variables) == len(values):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _share_errors(self) -> Any:
        return share_errors("checkpoint_callback.errors", hvd.global_process_set)
