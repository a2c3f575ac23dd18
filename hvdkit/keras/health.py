"""``HealthMonitor``: what is not finite on one rank is known on all, and its update left out."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import keras
import numpy as np

from hvdkit.agreement import format_ranks
from hvdkit.detectors import Detectors, Figures, read_resident_bytes
from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError, NonFiniteError
from hvdkit.events import EventLog
from hvdkit.health import HealthOptions, NonFinitePolicy, report_window
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import hvd
from hvdkit.keras.checkpoint import CheckpointStore
from hvdkit.keras.collectives import allgather_object, share_errors
from hvdkit.keras.distribution import find_distribution
from hvdkit.keras.guard import UpdateGuard
from hvdkit.keras.rollback import demand_settable_rate, lower_learning_rate, roll_back

__all__ = ["HealthMonitor"]


class HealthMonitor:
    """Watches one optimizer's training, on all ranks alike.

    ``HealthCallback`` uses one in ``fit``. A loop of your own makes one, passes each loss through
    ``watch`` inside of the step, compiled or not, and calls ``end_step`` after it, outside::

        monitor = hvd.HealthMonitor(model, optimizer)

        @tf.function
        def step(inputs, targets):
            with tf.GradientTape() as tape:
                loss = monitor.watch(loss_function(targets, model(inputs, training=True)))
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        for inputs, targets in dataset:
            loss = step(inputs, targets)
            monitor.end_step(loss)

    A gradient that is NaN or infinite on one rank is so on every rank once it is reduced; so all
    leave the update out alike, within the step, without a word between them. Only variables of
    ``register_local_var`` take one small all-reduce more. ``end_step`` then finds out whose it was,
    and ``nonfinite`` says what happens:

    * ``"skip"``: training goes on; parameters and optimizer state are as before the step.
    * ``"raise"``: every rank raises NonFiniteError.
    * ``"rollback"``: every rank goes back to the last good checkpoint of ``store`` with a lower
      learning rate.
    * None: nothing; not looked for.

    What ``LossScaleOptimizer`` skips is its business, and an event.

    Make it before the step is traced for the first time.

    Collective: every rank of the process set must construct it, with equal arguments.

    Args:
        model: What the optimizer trains.
        optimizer: By default the one that the model was compiled with. Distributed, or plain and
            fed by a ``DistributedGradientTape``: then only ``watch`` tells ranks from each other.
        nonfinite: See above.
        store: For ``"rollback"``; holds checkpoints of ``model`` and ``optimizer``.
        learning_rate_factor: For ``"rollback"``. Going back to the same checkpoint again
            multiplies by it once more.
        max_skips: So many updates in a row are skipped; the next one raises.
        max_rollbacks: So often the run goes back; the next time raises.
        window: Steps between two exchanges of step times, memory and losses; None: none.
        straggler_factor: A rank is slow if it needs so many times longer than the median of the
            others until its gradients are ready.
        spike_factor: A loss is a spike if it is so many robust standard deviations above the
            median of the last 100.
        events: Where events go beside Python logging.
        process_set: Of a tape; a distributed optimizer has its own.

    Attributes:
        steps: Steps that have ended.
        restored: What ``roll_back`` returned, until the end of the next step; else None.

    Raises:
        HvdkitError: On every rank, for arguments that do not fit.
        RankDisagreementError: Ranks passed different arguments.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        nonfinite: str | None = "skip",
        store: CheckpointStore | None = None,
        learning_rate_factor: float = 0.5,
        max_skips: int = 10,
        max_rollbacks: int = 3,
        window: int | None = 50,
        straggler_factor: float = 1.5,
        spike_factor: float = 10.0,
        events: EventLog | None = None,
        process_set: Any = hvd.global_process_set,
    ) -> None:
        self.restored: dict[str, Any] | None = None
        self.steps = 0
        self.model = model
        self.optimizer: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        distribution = find_distribution(self.optimizer)
        self._distributed = distribution is not None
        self._process_set = distribution.options.process_set if distribution else process_set
        self._alone = not self._process_set.included() or self._process_set.size() == 1
        self._ranks = [hvd.rank()] if self._alone else list(self._process_set.ranks)
        self._store = store
        self._options = HealthOptions(
            nonfinite,
            learning_rate_factor,
            max_skips,
            max_rollbacks,
            window,
            straggler_factor,
            spike_factor,
        )
        self._events = EventLog() if events is None else events

        def build() -> tuple[NonFinitePolicy | None, Detectors]:
            if not isinstance(self.optimizer, keras.optimizers.Optimizer):
                raise HvdkitError(
                    f"HealthMonitor needs a Keras 3 optimizer, not "
                    f"{type(self.optimizer).__name__}; pass optimizer=, or compile the model first"
                )
            if nonfinite == "rollback" and learning_rate_factor != 1:
                demand_settable_rate(self.optimizer)
            return self._options.build(has_store=store is not None)

        if self._alone or is_elastic():
            self._policy, self._detectors = build()
        else:
            with share_errors("health.arguments", self._process_set):
                self._policy, self._detectors = build()
            demand_equal_entries(
                "HealthMonitor",
                self._options.describe(),
                name="health.agreement",
                process_set=self._process_set,
            )
        self._counts = (0, 0, 0)
        self._scale: float | None = None
        self._began_s: float | None = None
        self._step_times_s: list[float] = []
        self._own_times_s: list[float] = []
        self._losses: list[float] = []
        self.guard = UpdateGuard()
        if self._policy is not None:
            self.guard.attach(self.optimizer)

    def watch(self, loss: Any) -> Any:
        """Return a loss for the tape; one that is not finite as NaN that reaches every gradient.

        Another one is unchanged, to the last bit. Inside of the step, compiled or not.
        """
        return loss if self._policy is None else self.guard.watch(loss)

    def end_step(self, loss: Any = None) -> None:
        """Look at the step that has ended; outside of compiled functions.

        Collective, if the step was not finite, and at the end of each window: every rank must call
        after each step.

        Args:
            loss: This rank's, to look for spikes; a number or a tensor of one element.

        Raises:
            NonFiniteError: On every rank; see ``nonfinite``.
        """
        now_s = time.time()
        step, self.steps = self.steps, self.steps + 1
        self.restored = None
        window = self._options.window
        if window is not None:
            self._note_step(now_s, loss)
        if self._policy is not None:
            self._look_at_scale(step)
            self._look_at_counts(step, self._policy)
        if window is not None and len(self._losses) >= window:
            self._close_window(step)
        self._began_s = time.time()

    # -- what is not finite ----------------------------------------------------------------

    def _look_at_counts(self, step: int, policy: NonFinitePolicy) -> None:
        counts = self.guard.read_counts()
        bad, own, lost = (now - then for now, then in zip(counts, self._counts, strict=True))
        self._counts = counts
        if not bad:
            policy.accept()
            return
        reports = self._gather((own > 0, lost > 0), "report")
        losing = [rank for rank, (_, lost) in zip(self._ranks, reports, strict=True) if lost]
        broken = [rank for rank, (own, _) in zip(self._ranks, reports, strict=True) if own]
        ranks = losing or broken
        if losing:
            problem = f"the loss of {format_ranks(ranks)} is not finite"
        elif broken:
            problem = f"gradients of {format_ranks(ranks)} are not finite"
        elif self._distributed:
            problem = "gradients are finite on every rank, but their sum overflowed"
        else:
            problem = "gradients are not finite (which rank's, only watch(loss) could tell)"
        # A compiled step may make several updates.
        decision = [policy.decide() for _ in range(bad)][-1]
        if decision == "raise":
            self._emit("nonfinite", problem, step, ranks, severity="error")
            raise NonFiniteError(f"step {step}: {problem}; raised {policy.explain()}")
        done = "skips the update" if decision == "skip" else "goes back"
        self._emit("nonfinite", f"{problem}; every rank {done}", step, ranks)
        if decision == "rollback":
            self._roll_back(step, policy)

    def _roll_back(self, step: int, policy: NonFinitePolicy) -> None:
        assert self._store is not None
        factor = self._options.learning_rate_factor
        self.restored = roll_back(
            self._store, self.model, self.optimizer, factor, self._process_set
        )
        saved = self.restored["step"]
        # That checkpoint has the rate from before the first time.
        lower_learning_rate(self.optimizer, factor ** policy.count_return(saved))
        rate = float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))
        message = f"restored the checkpoint of step {saved}; the learning rate is now {rate:g}"
        self._emit("rollback", message, step, [], restored_step=saved, learning_rates=[rate])

    def _look_at_scale(self, step: int) -> None:
        scale = getattr(self.optimizer, "dynamic_scale", None)
        if scale is None or not self.optimizer.built:
            return
        now = float(keras.ops.convert_to_numpy(scale))
        if self._scale is not None and now < self._scale:
            message = f"LossScaleOptimizer skips the update on every rank; its scale is now {now:g}"
            self._emit("nonfinite", message, step, [], severity="info")
        self._scale = now

    def _emit(
        self,
        kind: str,
        message: str,
        step: int,
        ranks: list[int],
        severity: str = "warning",
        **details: Any,
    ) -> None:
        if hvd.rank() == self._ranks[0]:
            if ranks:
                details["ranks"] = ranks
            rank = ranks[0] if len(ranks) == 1 else None
            self._events.emit(kind, message, severity=severity, step=step, rank=rank, **details)

    def _gather(self, obj: Any, what: str) -> list[Any]:
        if self._alone:
            return [obj]
        return allgather_object(obj, name=f"health.{what}", process_set=self._process_set)

    # -- the window ------------------------------------------------------------------------

    def _note_step(self, now_s: float, loss: Any) -> None:
        if self._began_s is not None:
            ready_s = self.guard.read_ready_s() if self._policy is not None else 0.0
            self._step_times_s.append(now_s - self._began_s)
            self._own_times_s.append(
                (ready_s if ready_s > self._began_s else now_s) - self._began_s
            )
        self._losses.append(math.nan if loss is None else float(keras.ops.convert_to_numpy(loss)))

    def _close_window(self, step: int) -> None:
        mine = Figures(
            statistics.median(self._step_times_s or [0.0]),
            statistics.median(self._own_times_s or [0.0]),
            read_resident_bytes(),
            0.0,
            tuple(np.float32(loss).item() for loss in self._losses),
        )
        figures = dict(zip(self._ranks, self._gather(mine, "window"), strict=True))
        findings = self._detectors.add(step, figures)
        if hvd.rank() == self._ranks[0]:
            report_window(self._events, step, findings, figures)
        self._step_times_s, self._own_times_s, self._losses = [], [], []
