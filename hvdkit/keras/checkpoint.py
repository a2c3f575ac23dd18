"""Checkpoints of a Keras training run: saved on rank 0, restored everywhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit import checkpoint
from hvdkit.errors import CheckpointError
from hvdkit.keras.backend import hvd
from hvdkit.keras.collectives import allgather_object, share_errors
from hvdkit.keras.payload import decode, encode, make_writer, read_payload
from hvdkit.keras.random_state import restore_random_state
from hvdkit.keras.state import (
    broadcast_initial_state,
    describe_variable,
    name_slots,
    name_variables,
    read_variable,
)

__all__ = ["CheckpointStore", "restore_from", "restore_or_broadcast"]


class CheckpointStore(checkpoint.CheckpointStore):
    """A directory of checkpoints that survives a crash while saving.

    ::

        store = hvd.CheckpointStore("checkpoints")
        restored = hvd.restore_or_broadcast(store, model, optimizer)
        first = restored["step"] if restored else 0
        ...
        store.save(step, model, optimizer, epoch=epoch)

    To go on in the middle of an epoch as if nothing had happened, save the random state as well:
    ``store.save(..., random=hvd.gather_random_state(model))``, which every rank then has to call.
    In ``fit``, ``callbacks.CheckpointCallback`` does all of it.

    The first save locks the directory for this process, until it ends or ``close`` is called.

    Args:
        directory: Only rank 0 needs to see it, unless another rank restores.
        keep: How many of the newest checkpoints to keep; None keeps all.
        keep_best: How many of those with the best scores to keep beside them.
        best_mode: Whether the best score is the least (``"min"``) or the greatest (``"max"``).
        asynchronous: ``save`` copies the state into the host's memory, a thread writes it. A
            second save waits for the first to be written, so there is one copy at most. An error
            is logged when it happens and raised by the next ``save``, ``wait`` or ``close``, or
            at the end of ``with store:``. The interpreter waits for the thread before it exits.
    """

    framework = "keras"

    def save(
        self,
        step: int,
        model: Any = None,
        optimizer: Any = None,
        *,
        score: float | None = None,
        random: Sequence[dict[str, Any]] | None = None,
        **extra: Any,
    ) -> Path | None:
        """Save on rank 0; every other rank returns at once.

        Any rank may call it or not; it is no collective. Batch-norm statistics are rank 0's:
        call ``average_buffers`` before to save those of all ranks. So are gradients that have been
        accumulated but not applied: save after an update.

        Args:
            step: Training steps done.
            model: Its variables are saved, seeds included.
            optimizer: Its variables are saved, plain or distributed alike; built if it was not.
            score: What the best checkpoints are chosen by, such as the validation loss; of rank
                0. NaN, infinities and None: never the best.
            random: What ``gather_random_state`` returned.
            extra: Numbers, strings, arrays, tensors, and dicts, lists and tuples of them.

        Returns:
            The path of the payload on rank 0, None elsewhere.

        Raises:
            CheckpointError: On rank 0, if it cannot be written, another job writes there, or it
                holds an object that could not be loaded again without running code from the
                file. In an asynchronous store, errors of the checkpoint before.
        """
        if hvd.rank() != 0:
            self.close()  # in an elastic job this process may have been rank 0
            return None
        self.wait()  # before another copy is made
        if model is not None and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)  # a fresh one: restoring builds it too
        arrays: list[np.ndarray] = []
        state = {
            "step": operator.index(step),  # NumPy's are no integers for JSON
            "model": None if model is None else _encode_variables("model", model, arrays),
            "optimizer": (
                None if optimizer is None else _encode_variables("optimizer", optimizer, arrays)
            ),
            "random": None if random is None else encode(list(random), "random", arrays),
            "extra": [[name, encode(value, name, arrays)] for name, value in extra.items()],
        }
        return self.write(step, make_writer(state, arrays), score)

    def load(self, step: int | None = None, *, best: bool = False) -> dict[str, Any] | None:
        """Load the newest whole checkpoint, that of a step or the best, on the rank that calls.

        Args:
            step: None for the newest.
            best: That with the best score.

        Returns:
            ``{"step", "model", "optimizer", "random", "extra"}``, model and optimizer as lists of
            (name, dtype and shape, array); None when the store is empty, or none has a score.

        Raises:
            CheckpointError: If there are checkpoints but none can be used, or none of ``step``;
                if another framework wrote it, or it is not what ``save`` writes.
        """
        found = self.choose(step, best)
        if found is None:
            return None
        try:
            state, arrays = read_payload(found.path)
        except Exception as error:  # of zip files, of arrays, of the header
            raise CheckpointError(
                f"{found.path} cannot be loaded as a checkpoint of hvdkit.keras: "
                f"{type(error).__name__}: {error}"
            ) from error
        for part in ("model", "optimizer"):
            if state[part] is not None:
                state[part] = [(name, kind, arrays[i]) for name, kind, i in state[part]]
        state["random"] = decode(state.get("random"), arrays)
        state["extra"] = {name: decode(value, arrays) for name, value in state["extra"]}
        return dict(state)


def restore_or_broadcast(
    store: CheckpointStore,
    model: Any,
    optimizer: Any = None,
    root_rank: int = 0,
    process_set: Any = hvd.global_process_set,
    *,
    best: bool = False,
) -> dict[str, Any] | None:
    """Start every rank from the newest checkpoint, or from the root's initial state.

    The root reads the store; model, optimizer and the rest then go to all ranks as
    ``broadcast_initial_state`` sends them. If the random state was saved, each rank gets its own
    back, and with another number of ranks one that follows from what was saved.

    Collective: every rank of ``process_set`` must call.

    Args:
        store: Read on the root only.
        model: Gets the saved state, or the root's.
        optimizer: Likewise; by default the one that the model was compiled with, if any.
        root_rank: The global rank that reads and sends.
        process_set: The ranks to send to.
        best: From the checkpoint with the best score instead of the newest.

    Returns:
        What ``save`` was given as extra, and ``"step"``; None when the store is empty.

    Raises:
        CheckpointError: On the root, if no checkpoint can be used; the other ranks raise
            RankDisagreementError at the same time, which quotes it.
    """
    return restore_from(
        lambda: store.load(best=best),
        model,
        optimizer,
        root_rank,
        process_set,
    )


def restore_from(
    load: Callable[[], dict[str, Any] | None],
    model: Any,
    optimizer: Any,
    root_rank: int,
    process_set: Any,
) -> dict[str, Any] | None:
    """Do what ``restore_or_broadcast`` does, with the checkpoint that ``load`` returns.

    Collective: every rank of ``process_set`` must call.

    Args:
        load: Called on the root only; returns what ``CheckpointStore.load`` does, or raises.
        model: The others as for ``restore_or_broadcast``.
        optimizer: Likewise.
        root_rank: Likewise.
        process_set: Likewise.
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    restored: tuple[Any, Any] = None, None
    with share_errors("restore_or_broadcast", process_set):
        if hvd.rank() == root_rank:
            restored = _restore(load(), model, optimizer)
    broadcast_initial_state(model, optimizer, root_rank, process_set)
    everyones = allgather_object(restored, name="restore_or_broadcast", process_set=process_set)
    extra, random = everyones[list(process_set.ranks).index(root_rank)]
    if random is not None:
        restore_random_state(random, model, process_set)
    return extra


def _restore(
    saved: dict[str, Any] | None, model: Any, optimizer: Any
) -> tuple[dict[str, Any] | None, list[dict[str, Any]] | None]:
    """Restore on the root; return the extra values and the random states."""
    if saved is None:
        return None, None
    targets = [("model", model)] + ([] if optimizer is None else [("optimizer", optimizer)])
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    assignments = []
    for part, target in targets:
        if saved[part] is None:
            raise CheckpointError(
                f"the checkpoint of step {saved['step']} was saved without the {part}; pass "
                f"{part}= to save"
            )
        entries = [(name, describe_variable(v)) for name, v in _name(part, target)]
        kinds = [(name, kind) for name, kind, _ in saved[part]]
        for theirs, ours in zip(
            kinds + [None] * (len(entries) - len(kinds)),
            entries + [None] * (len(kinds) - len(entries)),
            strict=True,
        ):
            if theirs != ours:
                raise CheckpointError(
                    f"the checkpoint of step {saved['step']} does not fit this {part}: it holds "
                    f"{theirs}, where there is {ours}"
                )
        assignments += [
            (v, array) for v, (_, _, array) in zip(target.variables, saved[part], strict=True)
        ]
    # All fit: nothing is left half restored.
    for variable, array in assignments:
        variable.assign(array)
    return {**saved["extra"], "step": saved["step"]}, saved.get("random")


def _name(part: str, target: Any) -> list[tuple[str, Any]]:
    return (name_slots if part == "optimizer" else name_variables)(target.variables)


def _encode_variables(part: str, target: Any, arrays: list[np.ndarray]) -> list[Any]:
    entries = []
    for name, variable in _name(part, target):
        # A copy: training may go on, and TensorFlow shares its memory.
        arrays.append(read_variable(variable).copy())
        entries.append([name, describe_variable(variable), len(arrays) - 1])
    return entries
