"""Replicas that differ: which version to trust, what to report, and what to do about it.

Framework-free, as ``hvdkit.agreement``: an adapter brings the digests and the collectives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.agreement import Difference, Gather, find_difference, format_ranks
from hvdkit.errors import HvdkitError, ReplicaMismatchError
from hvdkit.events import EventLog

__all__ = ["DEFAULT_STEPS", "MISMATCH_ACTIONS", "PeriodicCheck", "demand_equal_replicas"]

MISMATCH_ACTIONS = ("raise", "resync", "rollback")

# What a check takes of 500 steps of hvdkit bench's mlp, many-small and cnn, two workers on a core
# each, SGD or Adam: up to 0.15 % in PyTorch, up to 0.6 % in Keras on TensorFlow (many-small).
DEFAULT_STEPS = 500
_ADVICE = "; broadcast_initial_state makes them equal"


def demand_equal_replicas(
    digest: Callable[[], bytes],
    describe: Callable[[], list[tuple[str, str]]],
    measure: Callable[[int, int], float],
    *,
    name: str,
    gather: Gather,
    ranks: Sequence[int],
) -> None:
    """Raise the same error on every rank unless all hold the same.

    One digest of everything travels while the replicas are equal.

    Collective: every one of ``ranks`` must call, with the same ``name``.

    Args:
        digest: Returns a digest of all that is compared, names included; may raise HvdkitError.
        describe: Lists each part as name and text. A tensor's text has its dtype and shape, and
            behind the word ``digest`` its digest; that of a number is the number.
        measure: Is given the place of a tensor in that list and the rank that holds the
            reference, and returns the largest absolute difference from it on this rank. It is
            called on every rank, or on none.
        name: Names the operations.
        gather: As for ``find_difference``.
        ranks: The ranks that are compared.

    Raises:
        ReplicaMismatchError: Names the first part that differs, the ranks that hold each version,
            and the largest difference from the version that most ranks hold.
    """
    entries: list[tuple[str, str]] | HvdkitError
    try:
        entries = [("replica", digest().hex())]
    except HvdkitError as error:
        entries = error
    if find_difference(entries, name=name, gather=gather, ranks=ranks) is None:
        return
    difference = find_difference(describe(), name=f"{name}.parts", gather=gather, ranks=ranks)
    if difference is None:
        return  # the digest of the whole depends on which tensors share a device
    # Most ranks are right; of two equal parties the one with the lowest rank.
    _, trusted = max(difference.versions, key=lambda version: len(version[1]))
    sizes = _measure(difference, trusted[0], measure, name, gather)
    largest = None
    message = f"replicas differ, first at {difference}"
    if sizes is not None:
        largest = math.nan if any(map(math.isnan, sizes)) else max(sizes)
        far = [
            rank
            for rank, size in zip(ranks, sizes, strict=True)
            if size == largest or math.isnan(size)
        ]
        text = "NaN on one side alone" if math.isnan(largest) else f"{largest:.6g}"
        message += f"; largest difference from rank {trusted[0]}: {text} (on {format_ranks(far)})"
    raise ReplicaMismatchError(
        f"{message}{_ADVICE}",
        name=next(entry[0] for entry, _ in difference.versions if entry is not None),
        ranks=tuple(rank for rank in ranks if rank not in trusted),
        largest_difference=largest,
    )


def _measure(
    difference: Difference,
    root: int,
    measure: Callable[[int, int], float],
    name: str,
    gather: Gather,
) -> list[float] | None:
    """Return each rank's largest difference from the root; None where nothing can be subtracted."""
    entries = [entry for entry, _ in difference.versions if entry is not None]
    if len(entries) < len(difference.versions) or len({label for label, _ in entries}) > 1:
        return None
    kinds = {text.partition(" digest ")[0] for _, text in entries}
    if len(kinds) == 1 and all(" digest " in text for _, text in entries):
        return gather(measure(difference.index, root), f"{name}.difference")
    try:
        numbers = {
            rank: float(entry[1])
            for entry, ranks in difference.versions
            for rank in ranks
            if entry is not None
        }
    except ValueError:
        return None
    return [abs(numbers[rank] - numbers[root]) for rank in sorted(numbers)]


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
            f"{str(error).removesuffix(_ADVICE)}; {action}",
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
