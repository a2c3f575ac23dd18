"""``HealthMonitor``: what is not finite on one rank is known on all before the update."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from typing import Any

import torch
from horovod.torch.mpi_ops import allgather, rank

from hvdkit.agreement import format_ranks
from hvdkit.detectors import Detectors, Figures, read_resident_bytes
from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError, NonFiniteError
from hvdkit.events import EventLog
from hvdkit.health import HealthOptions, NonFinitePolicy, report_window
from hvdkit.torch.agreement import demand_equal_entries
from hvdkit.torch.checkpoint import CheckpointStore
from hvdkit.torch.collectives import allgather_object, share_errors
from hvdkit.torch.optimizer_class import is_distributed
from hvdkit.torch.restarts import RestartWatch
from hvdkit.torch.rollback import lower_learning_rate, roll_back

__all__ = ["HealthMonitor"]


class HealthMonitor:
    """Watches one distributed optimizer's training, on all ranks alike.

    ::

        monitor = hvd.HealthMonitor(model, optimizer, events=hvd.EventLog("events.jsonl"))
        ...
        optimizer.zero_grad()
        loss = monitor.watch(loss_function(model(inputs), targets))
        loss.backward()
        optimizer.step()

    A gradient that is NaN or infinite on one rank is so on every rank once it is reduced. It is
    looked for before each update, at the price of reading the gradients twice and, on a GPU, of
    waiting for them; so all ranks decide alike without a word between them. Then they say whose it
    was, and ``nonfinite`` says what happens:

    * ``"skip"``: no rank updates; parameters and optimizer state stay as they were.
    * ``"raise"``: every rank raises the same NonFiniteError.
    * ``"rollback"``: every rank goes back to the last good checkpoint of ``store`` with a lower
      learning rate, and ``restored`` holds what was saved with it until the next step.
    * None: nothing; not looked for.

    An update that ``torch.amp.GradScaler`` leaves out is its business, and an event.

    Every ``window`` steps ranks exchange their step times, memory and losses, which is when spikes
    of the loss, slow ranks and growing memory are found. The first rank sends the events.

    What must be equal on all ranks for this: the gradients when ``step()`` is called. Code of yours
    that changes them between ``backward()`` and ``step()`` must do the same on every rank.

    Collective: every rank of the optimizer's process set must construct it, with equal arguments.

    Args:
        model: What the optimizer trains.
        optimizer: Made by ``DistributedOptimizer``; it knows one monitor, the last.
        nonfinite: See above.
        store: For ``"rollback"``; holds checkpoints of ``model`` and ``optimizer``.
        learning_rate_factor: For ``"rollback"``. Going back to the same checkpoint again
            multiplies by it once more.
        scheduler: For ``"rollback"``; see ``roll_back``.
        max_skips: So many updates in a row are skipped; the next one raises.
        max_rollbacks: So often the run goes back; the next time raises.
        window: Steps between two exchanges; None: none.
        straggler_factor: A rank is slow if its own part of a step, which is what remains without
            the waits for reductions, is so many times the median of the others.
        spike_factor: A loss is a spike if it is so many robust standard deviations above the
            median of the last 100.
        events: Where events go beside Python logging.

    Attributes:
        steps: Steps that have ended, with or without an update.
        restored: What ``roll_back`` returned, until the next step; else None.

    Raises:
        HvdkitError: On every rank, for arguments that do not fit.
        RankDisagreementError: Ranks passed different arguments.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        nonfinite: str | None = "skip",
        store: CheckpointStore | None = None,
        learning_rate_factor: float = 0.5,
        scheduler: Any = None,
        max_skips: int = 10,
        max_rollbacks: int = 3,
        window: int | None = 50,
        straggler_factor: float = 1.5,
        spike_factor: float = 10.0,
        events: EventLog | None = None,
    ) -> None:
        if not is_distributed(optimizer):
            raise HvdkitError(
                f"HealthMonitor needs an optimizer made by DistributedOptimizer, not a "
                f"{type(optimizer).__name__}; wrap it first"
            )
        self.restored: dict[str, Any] | None = None
        self.steps = 0
        self._model = model
        # An optimizer that is dropped must stop reducing at once, and so on every rank alike: a
        # cycle of references would leave the moment to the garbage collector of each.
        self._find_optimizer = weakref.ref(optimizer)
        self._find_scheduler = (lambda: None) if scheduler is None else weakref.ref(scheduler)
        self._process_set = optimizer.process_set
        # With op=Adasum the reducer has nothing to do, but there are others.
        self._alone = self._reducer.alone and not optimizer._combines_updates
        self._ranks = [rank()] if self._alone else list(self._process_set.ranks)
        self._name = f"{self._reducer.name}.health"
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
            if nonfinite == "skip" and isinstance(optimizer, torch.optim.LBFGS):
                raise HvdkitError(
                    "nonfinite='skip' does not go with LBFGS, which moves the parameters before it "
                    "evaluates the loss again; use 'raise' or 'rollback'"
                )
            return self._options.build(has_store=store is not None)

        if self._alone or is_elastic():
            self._policy, self._detectors = build()
        else:
            with share_errors(f"{self._name}.arguments", self._process_set):
                self._policy, self._detectors = build()
            demand_equal_entries(
                "HealthMonitor",
                self._options.describe(),
                name=f"{self._name}.agreement",
                process_set=self._process_set,
            )
        self._losses: list[torch.Tensor] = []  # of the step under way
        self._reducer.probes = self._policy is not None
        self._restarts = RestartWatch()
        self._last: tuple[float, float] | None = None  # end of a step, waits until then
        self._begin_window()
        optimizer._health = self

    @property
    def _optimizer(self) -> Any:
        return self._find_optimizer()

    @property
    def _reducer(self) -> Any:
        return self._optimizer._reducer

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Note a loss before its backward pass; return it, for ``backward()``.

        One that is not finite comes back as NaN that reaches every gradient, and so every rank;
        another one is unchanged, to the last bit. Waits for no device.

        Args:
            loss: Floating point, of any shape; before ``GradScaler.scale``.
        """
        value = loss.detach()
        self._losses.append(value if value.dim() == 0 else value.mean())
        if self._policy is None:
            return loss
        return loss * (value - value + 1)  # one, or NaN

    # -- what the optimizer calls ----------------------------------------------------------

    def permits_update(self) -> bool:
        """Whether the final gradients may be applied; not for users."""
        self._check_world()
        self.restored = None
        if self._policy is None:
            return True
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is not None:  # a fused optimizer under GradScaler skips by itself
            if found_inf.item():
                self._tell_of_scaler()
            return True
        names = self._find_nonfinite()
        if not names:
            self._policy.accept()
            return True
        self._act(names, self._policy)
        return False

    def end_step(self) -> None:
        """A step has ended; not for users."""
        self.steps += 1
        losses, self._losses = self._losses, []
        window = self._options.window
        if window is None:
            return
        now_s, waited_s = time.perf_counter(), self._reducer.waited_s
        if self._last is not None:
            self._step_times_s.append(now_s - self._last[0])
            self._own_times_s.append(now_s - self._last[0] - (waited_s - self._last[1]))
        self._window_losses.append(losses)
        if len(self._window_losses) >= window:
            self._close_window()
        self._last = (time.perf_counter(), waited_s)

    def end_step_without_update(self) -> None:
        """``GradScaler`` has left out the update; not for users."""
        self._check_world()
        self._tell_of_scaler()
        self.end_step()

    # -- what is not finite ----------------------------------------------------------------

    def _find_nonfinite(self) -> list[str]:
        names: list[str] = self._reducer.find_nonfinite()
        if self._alone or not self._optimizer._combines_updates:
            return names
        # Adasum: gradients are not reduced, so they differ.
        everyones = self._gather(names, "found")
        return sorted({name for theirs in everyones for name in theirs})

    def _act(self, names: list[str], policy: NonFinitePolicy) -> None:
        problem, ranks, details = self._explain(names)
        decision = policy.decide()
        step = self.steps
        if decision == "skip":
            self._emit(f"{problem}; every rank skips the update", step, ranks, details)
        elif decision == "rollback":
            self._emit(f"{problem}; every rank goes back", step, ranks, details)
            self._roll_back(step, policy)
        else:
            message = f"step {step}: {problem}; raised {policy.explain()}"
            self._emit(problem, step, ranks, details, severity="error")
            self._reducer.end_window()
            self._losses = []
            self._last = None
            raise NonFiniteError(message)

    def _explain(self, names: list[str]) -> tuple[str, list[int], dict[str, Any]]:
        """Ask the ranks whose loss or gradients were not finite to begin with.

        Collective, when gradients are not finite: and so on every rank.
        """
        losses = [value.item() for value in self._losses]
        loss = next((value for value in losses if not math.isfinite(value)), None)
        own = self._reducer.find_own_nonfinite() if not self._reducer.alone else set(names)
        if self._optimizer._combines_updates:
            own = set(self._reducer.find_nonfinite())
        reports = self._gather((loss, [name for name in names if name in own]), "report")
        lost = {rank: one for rank, (one, _) in zip(self._ranks, reports, strict=True) if one}
        broken = {rank: one for rank, (_, one) in zip(self._ranks, reports, strict=True) if one}
        ranks = sorted(lost) or sorted(broken)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        gradients = f"the gradient of {names[0]!r}{more} is not finite"
        if lost:
            values = ", ".join(str(lost[rank]) for rank in ranks[:8])
            problem = f"the loss of {format_ranks(ranks)} is {values}"
        elif broken:
            names = next(iter(broken.values()))
            problem = f"the gradient of {names[0]!r}{more} is not finite on {format_ranks(ranks)}"
        else:
            problem = f"{gradients}, though finite on every rank: their sum overflowed"
        return problem, ranks, {"ranks": ranks, "parameters": names[:8]}

    def _roll_back(self, step: int, policy: NonFinitePolicy) -> None:
        assert self._store is not None
        factor = self._options.learning_rate_factor
        self._reducer.end_window()
        self.restored = roll_back(
            self._store,
            self._model,
            self._optimizer,
            factor,
            self._process_set,
            scheduler=self._find_scheduler(),
        )
        saved = self.restored["step"]
        # That checkpoint has the rate from before the first time; the scheduler does not.
        lower_learning_rate(self._optimizer, factor ** policy.count_return(saved))
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        message = f"restored the checkpoint of step {saved}; the learning rate is now {rates[0]:g}"
        if self._speaks():
            self._events.emit(
                "rollback", message, step=step, restored_step=saved, learning_rates=rates
            )

    def _tell_of_scaler(self) -> None:
        if self._speaks():
            message = "GradScaler skips the update on every rank, and lowers its scale"
            self._events.emit("nonfinite", message, severity="info", step=self.steps)

    def _emit(
        self,
        message: str,
        step: int,
        ranks: list[int],
        details: dict[str, Any],
        severity: str = "warning",
    ) -> None:
        if self._speaks():
            rank = ranks[0] if len(ranks) == 1 else None
            self._events.emit(
                "nonfinite", message, severity=severity, step=step, rank=rank, **details
            )

    def _speaks(self) -> bool:
        return rank() == self._ranks[0]

    def _gather(self, obj: Any, what: str) -> list[Any]:
        if self._alone:
            return [obj]
        return allgather_object(obj, name=f"{self._name}.{what}", process_set=self._process_set)

    # -- the window ------------------------------------------------------------------------

    def _begin_window(self) -> None:
        self._step_times_s: list[float] = []
        self._own_times_s: list[float] = []
        self._window_losses: list[list[torch.Tensor]] = []

    def _check_world(self) -> None:
        """Count windows anew when an elastic job has restarted: so do ranks that joined."""
        if self._restarts.notices():
            self._ranks = [rank()] if self._alone else list(self._process_set.ranks)
            self._last = None
            self._begin_window()

    def _close_window(self) -> None:
        """Exchange figures; look at them.

        Collective: every rank ends its window with the same step.
        """
        step_s = statistics.median(self._step_times_s or [0.0])
        own_s = statistics.median(self._own_times_s or [0.0])
        device_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        row = [step_s, own_s, read_resident_bytes(), device_bytes, *self._read_losses()]
        rows = torch.tensor([row], dtype=torch.float64)
        if not self._alone:
            rows = allgather(rows, name=f"{self._name}.window", process_set=self._process_set)
        figures = {
            rank: Figures(row[0], row[1], row[2], row[3], tuple(row[4:]))
            for rank, row in zip(self._ranks, rows.tolist(), strict=True)
        }
        findings = self._detectors.add(self.steps - 1, figures)
        if self._speaks():
            report_window(self._events, self.steps - 1, findings, figures)
        self._begin_window()

    def _read_losses(self) -> list[float]:
        """Return the mean loss of each step of the window; waits for the device once."""
        flat = [value for losses in self._window_losses for value in losses]
        values = iter(torch.stack([value.float() for value in flat]).tolist() if flat else ())
        means = []
        for losses in self._window_losses:
            mine = [next(values) for _ in losses]
            means.append(statistics.fmean(mine) if mine else math.nan)
        return means
