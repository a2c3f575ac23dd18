"""Compare replicas every so many steps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set, rank

from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError
from hvdkit.events import EventLog
from hvdkit.replica_check import DEFAULT_STEPS, PeriodicCheck
from hvdkit.torch.agreement import demand_equal_entries
from hvdkit.torch.checkpoint import CheckpointStore
from hvdkit.torch.initial_state import broadcast_optimizer_state, broadcast_parameters
from hvdkit.torch.optimizer_class import call_after_steps
from hvdkit.torch.replicas import compare_replicas
from hvdkit.torch.restarts import RestartWatch
from hvdkit.torch.rollback import roll_back

__all__ = ["ReplicaCheck"]


class ReplicaCheck(PeriodicCheck):
    """Compares the replicas every ``steps`` steps of an optimizer, to the last bit.

    It hooks itself to the optimizer and acts at the end of its steps; ``remove()`` ends that.
    Without an optimizer call ``step()`` after each step. A step that ``GradScaler`` leaves out is
    left out on every rank, and not counted.

    If replicas differ, ``on_mismatch`` says what happens:

    * ``"raise"``: ``ReplicaMismatchError`` on every rank;
    * ``"resync"``: every rank takes over what the first rank holds of all that is compared;
    * ``"rollback"``: every rank goes back to the last good checkpoint of ``store``, and
      ``restored`` is what it says.

    Collective in the first step and where a check is due: every rank must make the same steps.

    Args:
        model: The replica of this rank.
        optimizer: Plain or distributed. Its state and hyper-parameters are compared as well.
        steps: Steps between two checks, each of which reads everything once.
        buffers: Compare the buffers as well; see ``check_replicas``.
        on_mismatch: See above.
        store: For ``"rollback"``; holds checkpoints of ``model`` and ``optimizer``.
        events: Where a mismatch is told, beside Python logging, by the first rank.
        process_set: The ranks to compare; on others the object does nothing.

    Attributes:
        steps_seen: Steps counted so far.
        mismatches: How often replicas differed.
        restored: What the last rollback returned, else None.

    Raises:
        HvdkitError: An argument is out of range, or ``"rollback"`` lacks store or optimizer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        steps: int = DEFAULT_STEPS,
        buffers: bool = False,
        on_mismatch: str = "raise",
        store: CheckpointStore | None = None,
        events: EventLog | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(steps, on_mismatch, store, events)
        if on_mismatch == "rollback" and optimizer is None:
            raise HvdkitError("on_mismatch='rollback' needs the optimizer, which goes back too")
        self._model, self._buffers = model, buffers
        # Not held: an optimizer that is dropped stops reducing at once.
        self._find_optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._process_set = process_set
        self._restarts = RestartWatch()
        self._hook = None if optimizer is None else call_after_steps(optimizer, self.step)

    def step(self) -> None:
        """Count a step, and compare if the check is due; see the base class."""
        if self._restarts.notices():
            self.restart()
        if self._process_set.included():
            super().step()

    def remove(self) -> None:
        """Let the optimizer's steps go unchecked from here on. Call on every rank."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _agree(self, options: list[tuple[str, str]]) -> None:
        if not is_elastic() and self._process_set.size() > 1:
            demand_equal_entries(
                "ReplicaCheck",
                [
                    *options,
                    ("buffers", str(self._buffers)),
                    ("optimizer", str(self._find_optimizer() is not None)),
                ],
                name="replica_check.options",
                process_set=self._process_set,
            )

    def _compare(self, name: str) -> None:
        compare_replicas(
            name, self._model, self._buffers, self._find_optimizer(), self._process_set
        )

    def _resync(self) -> None:
        root = self._process_set.ranks[0]
        named: list[Any] = [*self._model.named_parameters()]
        named += self._model.named_buffers() if self._buffers else ()
        broadcast_parameters(named, root, self._process_set)
        optimizer = self._find_optimizer()
        if optimizer is not None:
            broadcast_optimizer_state(optimizer, root, process_set=self._process_set)

    def _roll_back(self) -> dict[str, Any]:
        optimizer = self._find_optimizer()
        assert optimizer is not None
        return roll_back(self.store, self._model, optimizer, process_set=self._process_set)

    def _speaks(self) -> bool:
        return bool(rank() == self._process_set.ranks[0])
