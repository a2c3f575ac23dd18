"""Compare replicas every so many steps."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.env import is_elastic
from hvdkit.events import EventLog
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import hvd
from hvdkit.keras.checkpoint import CheckpointStore
from hvdkit.keras.replicas import compare_replicas, list_compared
from hvdkit.keras.rollback import roll_back
from hvdkit.keras.state import broadcast_variables
from hvdkit.replica_check import DEFAULT_STEPS, PeriodicCheck

__all__ = ["ReplicaCheck"]


class ReplicaCheck(PeriodicCheck):
    """Compares the replicas every ``steps`` calls of ``step()``, to the last bit.

    For loops of your own: call ``step()`` after each step, outside of ``tf.function``. In ``fit``
    use ``callbacks.ReplicaCheckCallback``, which takes the same options.

    If replicas differ, ``on_mismatch`` says what happens:

    * ``"raise"``: ``ReplicaMismatchError`` on every rank;
    * ``"resync"``: every rank takes over what the first rank holds of all that is compared;
    * ``"rollback"``: every rank goes back to the last good checkpoint of ``store``, and
      ``restored`` is what it says.

    Collective in the first step and where a check is due: every rank must make the same steps. In
    an elastic job call ``restart()`` when ranks have come or gone.

    Args:
        model: The replica of this rank.
        optimizer: Its variables and hyper-parameters are compared as well. By default the one that
            the model was compiled with, if any.
        steps: Steps between two checks, each of which reads everything once.
        buffers: Compare the other variables as well; see ``check_replicas``.
        on_mismatch: See above.
        store: For ``"rollback"``; holds checkpoints of ``model`` and ``optimizer``.
        events: Where a mismatch is told, beside Python logging, by the first rank.
        process_set: The ranks to compare; on others the object does nothing.

    Attributes:
        steps_seen: Steps counted so far.
        mismatches: How often replicas differed.
        restored: What the last rollback returned, else None.

    Raises:
        HvdkitError: An argument is out of range, or ``"rollback"`` lacks a store.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        steps: int = DEFAULT_STEPS,
        buffers: bool = False,
        on_mismatch: str = "raise",
        store: CheckpointStore | None = None,
        events: EventLog | None = None,
        process_set: Any = hvd.global_process_set,
    ) -> None:
        super().__init__(steps, on_mismatch, store, events)
        self._model, self._optimizer, self._buffers = model, optimizer, buffers
        self._process_set = process_set

    def step(self) -> None:
        """Count a step, and compare if the check is due; see the base class."""
        if self._process_set.included():
            super().step()

    def watch(self, model: Any) -> None:
        """Compare another model from here on."""
        self._model = model

    def _find_optimizer(self) -> Any:
        optimizer = self._optimizer or getattr(self._model, "optimizer", None)
        return optimizer if isinstance(optimizer, keras.optimizers.Optimizer) else None

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
        named = list_compared(self._model, self._buffers, self._find_optimizer())
        broadcast_variables(
            [variable for _, variable in named], self._process_set.ranks[0], self._process_set
        )

    def _roll_back(self) -> dict[str, Any]:
        return roll_back(
            self.store, self._model, self._find_optimizer(), process_set=self._process_set
        )

    def _speaks(self) -> bool:
        return bool(hvd.rank() == self._process_set.ranks[0])
