"""Which checkpoint to go back to: the newest that is whole and that training can go on from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from hvdkit.checkpoint import CheckpointStore
from hvdkit.errors import CheckpointError, HvdkitError

__all__ = ["demand_lowering_factor", "load_newest_good"]


def demand_lowering_factor(factor: float) -> None:
    """Raise HvdkitError unless a learning rate stays the same or falls when multiplied by it."""
    if not 0 < factor <= 1:
        raise HvdkitError(f"learning_rate_factor must be above 0 and at most 1, not {factor}")


def load_newest_good(
    store: CheckpointStore, find_fault: Callable[[dict[str, Any]], str | None]
) -> dict[str, Any]:
    """Return what ``store.load`` does of the newest good checkpoint.

    Warns of each newer one that it passes over.

    Args:
        store: An adapter's store, with ``load(step)``.
        find_fault: Says what is wrong with a whole checkpoint; None: nothing.

    Raises:
        CheckpointError: There is none.
    """
    try:
        store.wait()
    except CheckpointError as error:
        warnings.warn(f"a checkpoint is missing: {error}", stacklevel=2)
    load: Callable[[int], dict[str, Any]] = store.load  # type: ignore[attr-defined]
    steps = dict.fromkeys(saved.step for saved in reversed(store.checkpoints()))
    for step in steps:
        try:
            saved = load(step)
            problem = find_fault(saved)
        except CheckpointError as error:
            problem = str(error)
        if problem is None:
            return saved
        warnings.warn(f"not going back to the checkpoint of step {step}: {problem}", stacklevel=2)
    raise CheckpointError(
        f"there is no good checkpoint in {store.directory} to go back to (steps found: "
        f"{', '.join(map(str, steps)) or 'none'}); save model and optimizer before training"
    )
