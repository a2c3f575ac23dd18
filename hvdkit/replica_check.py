"""When to compare replicas, and what to do if they differ.

Framework-free: an adapter's ``ReplicaCheck`` compares, sends and goes back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hvdkit.errors import HvdkitError, ReplicaMismatchError
from hvdkit.events import EventLog
from hvdkit.replicas import ADVICE

__all__ = ["DEFAULT_STEPS", "PeriodicCheck"]

MISMATCH_ACTIONS = ("raise", "resync", "rollback")

# What a check takes of 500 steps of hvdkit bench's mlp, many-small and cnn, two workers on a core
# each, SGD or Adam: up to 0.15 % in PyTorch, up to 0.6 % in Keras on TensorFlow (many-small).
DEFAULT_STEPS = 500


class PeriodicCheck(ABC):
    """Compares replicas every ``steps`` steps, and does what was asked for if they differ.

    Args:
        steps: Steps between two checks.
        on_mismatch: ``"raise"``, ``"resync"`` or ``"rollback"``.
        store: Holds the checkpoints to go back to.
        events: Where a mismatch is told, beside Python logging.

    Raises:
        HvdkitError: An argument is out of range, or there is no store to go back to.
    """

    def __init__(self, steps: int, on_mismatch: str, store: Any, events: EventLog | None) -> None:
        if steps < 1:
            raise HvdkitError(f"steps must be at least 1, not {steps}")
        if on_mismatch not in MISMATCH_ACTIONS:
            raise HvdkitError(
                f"on_mismatch must be one of {', '.join(MISMATCH_ACTIONS)}, not {on_mismatch!r}"
            )
        if on_mismatch == "rollback" and store is None:
            raise HvdkitError(
                "on_mismatch='rollback' needs store=CheckpointStore(...) to go back to"
            )
        self.steps = steps
        self.on_mismatch = on_mismatch
        self.store = store
        self.events = EventLog() if events is None else events
        self.steps_seen = 0
        self.mismatches = 0
        self.restored: dict[str, Any] | None = None

    def step(self) -> None:
        """Count a training step, and compare if the check is due.

        Collective in the first step and where it is due: every rank must have counted the same.

        Raises:
            RankDisagreementError: On every rank, if ranks were given other options.
            ReplicaMismatchError: On every rank, with ``on_mismatch="raise"``.
        """
        if self.steps_seen == 0:
            # One rank that checks more often than the others would wait for them.
            self._agree([("steps", str(self.steps)), ("on_mismatch", self.on_mismatch)])
        self.steps_seen += 1
        if self.steps_seen % self.steps == 0:
            self.check()

    def check(self) -> bool:
        """Compare now; return whether the replicas were equal.

        Collective: every rank must call.

        Raises:
            ReplicaMismatchError: On every rank, with ``on_mismatch="raise"``.
        """
        try:
            # A rank that has lost count is found by the stall check, which shows this name.
            self._compare(f"replica_check.step{self.steps_seen}")
        except ReplicaMismatchError as error:
            self.mismatches += 1
            self._tell(error)
            if self.on_mismatch == "raise":
                raise
            if self.on_mismatch == "resync":
                self._resync()
            else:
                self.restored = self._roll_back()
                self._emit(
                    "rollback",
                    f"every rank went back to the checkpoint of step {self.restored['step']}",
                    restored_step=self.restored["step"],
                )
            return False
        return True

    def _tell(self, error: ReplicaMismatchError) -> None:
        action = {
            "raise": "training ends",
            "resync": "every rank takes the values of the first one",
            "rollback": "every rank goes back to the last good checkpoint",
        }[self.on_mismatch]
        self._emit(
            "replica_mismatch",
            f"{str(error).removesuffix(ADVICE)}; {action}",
            severity="error" if self.on_mismatch == "raise" else "warning",
            name=error.name,
            ranks=list(error.ranks),
            largest_difference=error.largest_difference,
            action=self.on_mismatch,
        )

    def _emit(self, kind: str, message: str, severity: str = "warning", **details: Any) -> None:
        if self._speaks():
            self.events.emit(kind, message, severity=severity, step=self.steps_seen, **details)

    def restart(self) -> None:
        """Count from the start: in an elastic job ranks have joined, who did not count."""
        self.steps_seen = 0

    @abstractmethod
    def _agree(self, options: list[tuple[str, str]]) -> None:
        """Raise RankDisagreementError unless all ranks have these options."""

    @abstractmethod
    def _compare(self, name: str) -> None:
        """Raise ReplicaMismatchError if replicas differ."""

    @abstractmethod
    def _resync(self) -> None:
        """Give every rank what the first one holds of all that is compared."""

    @abstractmethod
    def _roll_back(self) -> dict[str, Any]:
        """Go back to the last good checkpoint and return what it says."""

    @abstractmethod
    def _speaks(self) -> bool:
        """Whether this rank tells what all ranks know."""
