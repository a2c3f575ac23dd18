"""What a ``HealthMonitor`` is asked for, and what to do about updates that are not finite. Pure.

Every rank has the same options and is told the same, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hvdkit.detectors import Detectors, Figures, Finding
from hvdkit.errors import HvdkitError
from hvdkit.events import EventLog
from hvdkit.rollback import demand_lowering_factor

__all__ = ["ACTIONS", "HealthOptions", "NonFinitePolicy", "report_window"]

ACTIONS = ("skip", "raise", "rollback")


@dataclass(frozen=True)
class HealthOptions:
    """The options that monitors of all frameworks have; ``HealthMonitor`` says what each means."""

    nonfinite: str | None
    learning_rate_factor: float
    max_skips: int
    max_rollbacks: int
    window: int | None
    straggler_factor: float
    spike_factor: float

    def build(self, has_store: bool) -> tuple[NonFinitePolicy | None, Detectors]:
        """Return what decides and what watches; a policy only where ``nonfinite`` is not None.

        Args:
            has_store: Whether there is a ``CheckpointStore`` to go back to.

        Raises:
            HvdkitError: An option is out of range, or ``"rollback"`` has no store.
        """
        policy = None
        if self.nonfinite is not None:
            policy = NonFinitePolicy(self.nonfinite, self.max_skips, self.max_rollbacks)
        if self.nonfinite == "rollback" and not has_store:
            raise HvdkitError("nonfinite='rollback' needs store=CheckpointStore(...) to go back to")
        demand_lowering_factor(self.learning_rate_factor)
        if self.window is not None and self.window < 1:
            raise HvdkitError(f"window must be at least 1 step, or None, not {self.window}")
        return policy, Detectors(self.straggler_factor, self.spike_factor)

    def describe(self) -> list[tuple[str, str]]:
        """List the options, for ``demand_equal_entries``."""
        return [(name, str(value)) for name, value in asdict(self).items()]


class NonFinitePolicy:
    """What to do about each update whose gradients are not finite.

    Args:
        action: ``skip``, ``raise`` or ``rollback``.
        max_skips: So many updates in a row are skipped; the next one is an error.
        max_rollbacks: So often the run goes back; the next time is an error.
    """

    def __init__(self, action: str, max_skips: int = 10, max_rollbacks: int = 3) -> None:
        if action not in ACTIONS:
            raise HvdkitError(f"nonfinite must be one of {', '.join(ACTIONS)}, not {action!r}")
        for name, value in (("max_skips", max_skips), ("max_rollbacks", max_rollbacks)):
            if value < 0:
                raise HvdkitError(f"{name} must be at least 0, not {value}")
        self.action = action
        self.max_skips = max_skips
        self.max_rollbacks = max_rollbacks
        self.skipped = 0  # in a row
        self.rollbacks = 0
        self._returns: dict[int, int] = {}

    def accept(self) -> None:
        """Count an update whose gradients are finite."""
        self.skipped = 0

    def decide(self) -> str:
        """Return what to do about one whose gradients are not."""
        if self.action == "skip" and self.skipped < self.max_skips:
            self.skipped += 1
            return "skip"
        if self.action == "rollback" and self.rollbacks < self.max_rollbacks:
            self.rollbacks += 1
            return "rollback"
        return "raise"

    def explain(self) -> str:
        """Say why the decision was to raise."""
        if self.action == "skip":
            return f"after {self.skipped} skipped updates in a row (max_skips)"
        if self.action == "rollback":
            return f"after {self.rollbacks} rollbacks (max_rollbacks)"
        return "as nonfinite='raise' asks for"

    def count_return(self, step: int) -> int:
        """Note that the run went back to the checkpoint of ``step``; return how often before."""
        before = self._returns.get(step, 0)
        self._returns[step] = before + 1
        return before


def report_window(
    events: EventLog, step: int, findings: list[Finding], figures: Mapping[int, Figures]
) -> None:
    """Send what a window has shown, and the figures of each rank; one rank does so for all.

    Args:
        events: Where to.
        step: The last one of the window.
        findings: What ``Detectors.add`` returned.
        figures: By rank.
    """
    for one in findings:
        events.emit(one.kind, one.message, step=one.step, rank=one.rank, **one.details)
    for rank, held in figures.items():
        events.record(step, rank, held.named())
