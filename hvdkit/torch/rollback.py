"""Go back to the last good checkpoint, with a lower learning rate."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvdkit.rollback import demand_lowering_factor, load_newest_good
from hvdkit.torch.checkpoint import CheckpointStore, restore_from
from hvdkit.torch.collectives import share_errors
from hvdkit.torch.schedule import multiply_rates

__all__ = ["lower_learning_rate", "roll_back"]


def roll_back(
    store: CheckpointStore,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    learning_rate_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Restore the newest good checkpoint on all ranks and multiply the learning rate.

    A checkpoint is good if it is whole and its parameters are finite; others are passed over
    with a warning. The first rank of ``process_set`` reads the store.

    Most schedulers go on from the lowered rate. Those that compute each rate anew from rates of
    their own (``LambdaLR``) must be passed. How far a scheduler has come is not restored: save
    ``scheduler.state_dict()`` with the checkpoint, and load it before the rate is lowered, or keep
    the count of steps that it has.

    Collective: every rank of ``process_set`` must call.

    Args:
        store: Holds checkpoints of ``model`` and ``optimizer``.
        model: Restored in place.
        optimizer: Restored in place, plain or distributed.
        learning_rate_factor: The rate of every parameter group, as restored, is multiplied by it.
        process_set: The ranks that go back together.
        scheduler: The rates that it derives later ones from are multiplied as well.

    Returns:
        What ``save`` was given as extra, and ``"step"``.

    Raises:
        HvdkitError: On every rank, if there is no good checkpoint or it does not fit.
    """
    with share_errors("roll_back", process_set):
        demand_lowering_factor(learning_rate_factor)
    restored = restore_from(
        lambda: load_newest_good(store, lambda saved: _find_fault(saved, model)),
        model,
        optimizer,
        process_set.ranks[0],
        process_set,
    )
    assert restored is not None
    lower_learning_rate(optimizer, learning_rate_factor, scheduler)
    return restored


def lower_learning_rate(
    optimizer: torch.optim.Optimizer, factor: float, scheduler: Any = None
) -> None:
    """Multiply the rates of an optimizer and those of its scheduler.

    Raises:
        HvdkitError: The factor is not above 0, or above 1.
    """
    demand_lowering_factor(factor)
    if factor != 1:
        multiply_rates(optimizer, factor, () if scheduler is None else (scheduler,))


def _find_fault(saved: dict[str, Any], model: torch.nn.Module) -> str | None:
    """Say why a whole checkpoint is not good. Buffers may hold infinities on purpose."""
    for part in ("model", "optimizer"):
        if saved[part] is None:
            return f"it was saved without the {part}"
    for name, _ in model.named_parameters():
        value = saved["model"].get(name)
        if isinstance(value, torch.Tensor) and not bool(torch.isfinite(value).all()):
            return f"parameter {name!r} is not finite in it"
    for state in saved["optimizer"]["state"].values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and bool(torch.isnan(value).any()):
                return f"the optimizer's {key!r} holds NaN in it"
    return None
