"""Checkpoints of a PyTorch training run: saved on rank 0, restored everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set, rank

from hvdkit import checkpoint
from hvdkit.errors import CheckpointError
from hvdkit.torch.collectives import broadcast_object, share_errors
from hvdkit.torch.initial_state import broadcast_initial_state
from hvdkit.torch.optimizer_state import list_parameters
from hvdkit.torch.random_state import restore_random_state
from hvdkit.torch.snapshot import copy_to_host, replace_scalars

_KEYS = ("step", "model", "optimizer", "extra")

__all__ = ["CheckpointStore", "restore_from", "restore_or_broadcast"]


class CheckpointStore(checkpoint.CheckpointStore):
    """A directory of checkpoints that survives a crash while saving.

    ::

        store = hvd.CheckpointStore("checkpoints")
        restored = hvd.restore_or_broadcast(store, model, optimizer)
        first = restored["step"] if restored else 0
        ...
        store.save(step, model, optimizer, sampler=sampler.state_dict())

    To go on in the middle of an epoch as if nothing had happened, save the random state as well:
    ``store.save(..., random=hvd.gather_random_state())``, which every rank then has to call.

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

    framework = "torch"

    def save(
        self,
        step: int,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        score: float | None = None,
        random: Sequence[dict[str, Any]] | None = None,
        **extra: Any,
    ) -> Path | None:
        """Save on rank 0; every other rank returns at once.

        Any rank may call it or not; it is no collective. Batch-norm statistics are rank 0's:
        call ``average_buffers`` before to save those of all ranks.

        Args:
            step: Training steps done.
            model: Saved as its ``state_dict``.
            optimizer: Saved as its ``state_dict``, plain or distributed alike.
            score: What the best checkpoints are chosen by, such as the validation loss; of rank
                0. NaN, infinities and None: never the best.
            random: What ``gather_random_state`` returned.
            extra: Numbers, strings, tensors, and dicts, lists and tuples of them. NumPy's numbers
                become Python's; its arrays are refused: ``torch.from_numpy`` makes tensors.

        Returns:
            The path of the payload on rank 0, None elsewhere.

        Raises:
            CheckpointError: On rank 0, if it cannot be written, another job writes there, or it
                holds an object that could not be loaded again without running code from the
                file. In an asynchronous store, errors of the checkpoint before.
        """
        if rank() != 0:
            self.close()  # in an elastic job this process may have been rank 0
            return None
        self.wait()  # before another copy is made
        state = replace_scalars(
            {
                "step": step,
                "model": None if model is None else model.state_dict(),
                "optimizer": None if optimizer is None else optimizer.state_dict(),
                "random": None if random is None else list(random),
                "extra": extra,
            }
        )
        if self.asynchronous:
            state = copy_to_host(state)

        def write(file: BinaryIO) -> None:
            _dump(state, file)
            file.flush()
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file.name)
            if unsafe:
                raise CheckpointError(
                    f"the checkpoint of step {step} holds {', '.join(sorted(unsafe))}, which "
                    "loading with weights_only=True refuses; save numbers, strings, tensors (of "
                    "NumPy's arrays torch.from_numpy), dicts and lists"
                )

        return self.write(step, write, score)

    def load(
        self, step: int | None = None, map_location: Any = "cpu", *, best: bool = False
    ) -> dict[str, Any] | None:
        """Load the newest whole checkpoint, that of a step or the best, on the rank that calls.

        Args:
            step: None for the newest.
            map_location: Where tensors go, as in ``torch.load``.
            best: That with the best score.

        Returns:
            ``{"step", "model", "optimizer", "random", "extra"}``; None when the store is empty,
            or none has a score.

        Raises:
            CheckpointError: If there are checkpoints but none can be used, or none of ``step``;
                if another framework wrote it; if it is not what ``save`` writes, and loading it
                could run code.
        """
        found = self.choose(step, best)
        if found is None:
            return None
        try:
            state = torch.load(found.path, map_location=map_location, weights_only=True)
            return {"random": None} | {key: state[key] for key in _KEYS} | state
        except Exception as error:  # the old format's reader raises all kinds
            raise CheckpointError(
                f"{found.path} cannot be loaded as a checkpoint of hvdkit.torch, and nothing in "
                f"it was run: {type(error).__name__}: {error}"
            ) from error


def restore_or_broadcast(
    store: CheckpointStore,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
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
        optimizer: Likewise.
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
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    root_rank: int,
    process_set: ProcessSet,
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
    restored: tuple[Any, Any] = None, None
    with share_errors("restore_or_broadcast", process_set):
        if rank() == root_rank:
            restored = _restore(load(), model, optimizer)
    broadcast_initial_state(model, optimizer, root_rank, process_set)
    extra, random = broadcast_object(
        restored, root_rank, name="restore_or_broadcast.extra", process_set=process_set
    )
    if random is not None:
        restore_random_state(random, process_set)
    return extra


def _dump(state: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # What the file refused (a full disk) comes as a complaint about a wrong position.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _restore(
    saved: dict[str, Any] | None,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[dict[str, Any] | None, list[dict[str, Any]] | None]:
    """Restore on the root; return the extra values and the random states."""
    if saved is None:
        return None, None
    for name, target in (("model", model), ("optimizer", optimizer)):
        if target is None:
            continue
        if saved[name] is None:
            raise CheckpointError(
                f"the checkpoint of step {saved['step']} was saved without the {name}; pass "
                f"{name}= to save"
            )
        try:
            target.load_state_dict(saved[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint of step {saved['step']} does not fit this {name}: {error}"
            ) from error
    if optimizer is not None:
        _undo_casts(optimizer, saved["optimizer"]["state"])
    return {**saved["extra"], "step": saved["step"]}, saved.get("random")


def _undo_casts(optimizer: torch.optim.Optimizer, saved: dict[Any, Any]) -> None:
    """Bring back each state's own dtype.

    ``Optimizer.load_state_dict`` casts to that of the parameter, which loses the bits of
    float32 state of a 16-bit parameter.
    """
    for index, parameter in enumerate(list_parameters(optimizer)):
        for key, value in saved.get(index, {}).items():
            if isinstance(value, torch.Tensor):
                loaded = optimizer.state[parameter].get(key)
                if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(loaded.device)
