"""The reducer: follows gradients through the backward pass and reduces them bucket by bucket.

Words used here: a *pass* is one backward pass. A *window* is the passes from one optimizer
step to the next. A *round* is one reduction of all gradients; it happens when the window has
its ``backward_passes_per_step`` passes, again at the end of every further pass, and at
``step()`` if gradients are still unreduced. A further round is harmless: the mean of a value
that all ranks share is that value.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdkit import trace
from hvdkit.errors import HvdkitError
from hvdkit.torch.autograd import accumulates, comes_last, find_custom_backward
from hvdkit.torch.nonfinite import find_nonfinite, find_own_nonfinite
from hvdkit.torch.plan import EagerReduction, LateReduction, ReductionOptions, make_plan
from hvdkit.torch.restarts import RestartWatch
from hvdkit.torch.round import Round
from hvdkit.torch.slot import Slot

__all__ = ["GradientReducer"]

# A parameter is reduced by the optimizer that was wrapped last; two would divide it twice.
_owners: Any = WeakTensorKeyDictionary()


class GradientReducer:
    """Reduces the gradients of one optimizer's parameters over a process set.

    Args:
        options: How to reduce.
        name: Prefix of all operation names; the same on every rank, unlike any other reducer's.
        alone: Whether there is nobody to reduce with, now and later.
    """

    def __init__(self, options: ReductionOptions, name: str, alone: bool) -> None:
        self.options = options
        self.name = name
        self.alone = alone
        self.probes = False  # whether to note if this rank's own gradients are finite
        self.waited_s = 0.0  # for reductions, with nothing else to do
        self._slots: dict[int, Slot] = {}
        self._hooks: dict[int, list[Any]] = {}
        self._released: set[int] = set()
        self._enabled = True  # False inside no_sync()
        self._active = True
        self._active_ranks: int | None = None
        self._plans = 0
        self._restarts = RestartWatch()
        self._dirty = False
        self._start_window()
        self._forget_plan()

    # -- parameters ------------------------------------------------------------------------

    def knows(self, param: torch.nn.Parameter) -> bool:
        """Whether ``param`` is followed, or was until another optimizer took it over."""
        return id(param) in self._slots or id(param) in self._released

    def adopt(self, name: str, param: torch.nn.Parameter) -> None:
        """Follow a trainable parameter that is not known yet."""
        slot = self._slots[id(param)] = Slot(param, name)
        self._unplanned.append(slot)
        self._dirty = self._dirty or param.grad is not None
        self._attach(slot)

    def _attach(self, slot: Slot) -> None:
        owner = _owners.get(slot.param)
        previous = owner() if owner is not None else None
        if previous is not None:
            previous._release(slot.param)
        myself = weakref.ref(self)
        _owners[slot.param] = myself

        # The hooks must not keep the reducer alive: an optimizer that is dropped stops
        # reducing at once, and so on every rank alike.
        def after(param: Any) -> None:
            reducer = myself()
            if reducer is not None:
                reducer._on_gradient(slot, final=comes_last(param, hooks[0].id))

        def before(grad: torch.Tensor) -> None:
            reducer = myself()
            if reducer is not None:
                reducer._before_gradient(slot)

        hooks = [slot.param.register_post_accumulate_grad_hook(after)]
        if self.options.reopens or slot.large:
            hooks.append(slot.param.register_hook(before))
        self._hooks[id(slot.param)] = hooks
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    def _release(self, param: torch.Tensor) -> None:
        for hook in self._hooks.pop(id(param)):
            hook.remove()
        del self._slots[id(param)]
        self._released.add(id(param))
        self._forget_plan()

    # -- the window ------------------------------------------------------------------------

    def _start_window(self) -> None:
        self._passes_ended = 0
        # Graph tasks of the pass under way: several if it calls backward() within itself.
        self._tasks: set[int] = set()
        self._outermost: int | None = None
        self._dirty = False  # a gradient was added to since the last round
        self._reduced = False  # a round has taken place in this window
        self._reduced_passes = 1
        self._factors: Round | None = None

    @torch.no_grad()
    def end_window(self) -> None:
        """Count passes anew, as after a step; gradients stay as they are."""
        self._check_world()
        self._drain()  # of a backward pass that broke off: let the other ranks go on
        self._expect()
        self._start_window()

    def restart(self) -> None:
        """Forget what is under way; what Horovod lost in a reset is not waited for."""
        self._forget_plan()
        self._start_window()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let passes accumulate locally; the next pass outside reduces what they left."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def set_participation(self, active: bool, active_ranks: int | None) -> None:
        """Set whether this rank's gradients count, and how many ranks' do (None: all)."""
        self._active, self._active_ranks = active, active_ranks
        self._factors = None

    @property
    def unreduced(self) -> bool:
        """Whether a gradient was added to since the last reduction."""
        return self._dirty

    @property
    def passes(self) -> int:
        """Passes made in this window, the one under way included; at least one."""
        return max(self._passes_ended + bool(self._tasks), 1)

    def _now(self) -> Round:
        if self._factors is None:
            self._factors = self.options.round(
                ranks=1 if self.alone else self._active_ranks or self._ranks,
                active=self._active,
                passes=self.passes,
                reduced_passes=self._reduced_passes,
            )
            self._factors.probes = self.probes
        return self._factors

    # -- what autograd calls ---------------------------------------------------------------

    def _before_gradient(self, slot: Slot) -> None:
        grad, bucket = slot.param.grad, slot.bucket
        if grad is not None:
            if not accumulates(slot.param):
                return
            if bucket is not None:
                bucket.take_back(slot)
            if self.options.reopens and slot.holds_result():
                grad.mul_(self._now().reopen)
        slot.reduced = False

    def _on_gradient(self, slot: Slot, final: bool) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._begin_backward(task)
        self._dirty = True
        bucket = slot.bucket
        if bucket is None:
            self._ready_order.setdefault(id(slot.param), None)
            return
        if bucket.in_flight:
            raise HvdkitError(
                f"{slot.name!r} got a second gradient in one backward pass while the first was "
                "being reduced; use torch.utils.checkpoint with use_reentrant=False"
            )
        passes = self.options.backward_passes_per_step
        if not final or not self._enabled or (passes > 1 and self.passes < passes):
            return
        if task == self._outermost or not self.options.average_aggregated_gradients:
            # Else it may be added to once more and be divided by other passes than the rest.
            bucket.add(slot, self._now())

    def _begin_backward(self, task: int) -> None:
        self._check_world()
        self._check_conversions()
        enclosing = find_custom_backward()
        if not self._tasks or (enclosing is None and self._outermost is not None):
            self._begin_pass()
        self._tasks.add(task)
        self._factors = None
        callback = self._drain
        if enclosing is None:
            self._outermost, callback = task, self._end_pass
        else:
            # A nested pass (reentrant checkpointing): more gradients may come after it, or none
            # that would call us before the outer pass ends.
            self._follow(enclosing)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _follow(self, node: Any) -> None:
        """Notice the graph task that ``node`` runs in, once it comes to the nodes behind."""

        def notice(_: Any) -> None:
            for handle in handles:
                handle.remove()
            task = torch._C._current_graph_task_id()
            if task not in self._tasks:
                self._begin_backward(task)

        handles = [
            behind.register_prehook(notice)
            for behind, _ in node.next_functions
            if behind is not None
        ]

    @torch.no_grad()
    def _begin_pass(self) -> None:
        self._drain()  # of a pass that broke off
        self._tasks.clear()
        self._outermost = None
        self._expect()
        trace.begin("backward")

    def _expect(self) -> None:
        """Start to fill buckets; what was trainable last time may be frozen now."""
        for reduction in self._eager:
            reduction.expect()

    @torch.no_grad()
    def _end_pass(self) -> None:
        self._tasks.clear()
        self._passes_ended += 1
        self._factors = None
        trace.end("backward")
        if self._enabled and self.passes >= self.options.backward_passes_per_step:
            self._reduce()

    # -- reducing --------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce whatever is not reduced yet, and drop the gradients of frozen parameters.

        Collective: every rank must call, unless all have nothing left to reduce.
        """
        self._check_world()
        if self._dirty or not self._reduced:
            self._check_conversions()
            self._reduce()
        for slot in self._slots.values():
            if not slot.param.requires_grad:
                slot.param.grad = None  # not even weight decay may touch it

    def _reduce(self) -> None:
        now = self._now()
        if self.alone:
            if self.options.average_aggregated_gradients:
                self._average_locally(now)
        else:
            try:
                if self._unplanned:
                    self._plan()
                for eager in self._eager:
                    if not eager.in_flight and not eager.done:
                        eager.launch(now)
                for late in self._late:
                    late.launch(now)
                self._drain()
            except BaseException:
                self.restart()
                raise
        self._reduced, self._dirty = True, False
        self._reduced_passes = self.passes
        self._factors = None

    @torch.no_grad()
    def _drain(self) -> None:
        """Bring what is under way to an end."""
        pending = [reduction for reduction in self._reductions() if reduction.in_flight]
        if pending:
            began_s = time.perf_counter()
            with trace.span("wait"):
                for reduction in pending:
                    reduction.finish(self._now())
            self.waited_s += time.perf_counter() - began_s

    def _reductions(self) -> list[EagerReduction | LateReduction]:
        return [*self._eager, *self._late]

    def _average_locally(self, now: Round) -> None:
        for slot in self._slots.values():
            if (grad := slot.param.grad) is not None:
                slot.accept(grad.mul_(now.scale * now.reopen if slot.holds_result() else now.scale))

    # -- what is not finite ----------------------------------------------------------------

    def find_nonfinite(self) -> list[str]:
        """Return the names of parameters whose reduced gradients are NaN or infinite somewhere.

        What is reduced is the same on every rank, and so is this.
        """
        return find_nonfinite(self._slots.values(), self._eager)

    def find_own_nonfinite(self) -> set[str]:
        """Return the names of parameters among whose gradients this rank's own were not finite.

        All in a bucket share what is known about it. Nothing is known unless ``probes`` was set
        when they were sent.
        """
        return find_own_nonfinite(self._reductions())

    # -- the plan --------------------------------------------------------------------------

    def _forget_plan(self) -> None:
        self._eager: list[EagerReduction] = []
        self._late: list[LateReduction] = []
        self._unplanned = list(self._slots.values())
        self._ready_order: dict[int, None] = {}
        for slot in self._unplanned:
            slot.bucket = slot.sparse_dim = None
        self._ranks = self.options.process_set.size() or 1

    def _check_world(self) -> None:
        if self._restarts.notices():
            self._plans = 0  # whose names must be those of ranks that have just started
            self.restart()

    def _check_conversions(self) -> None:
        if not self._tasks and any(reduction.outdated() for reduction in self._eager):
            self._forget_plan()

    def _plan(self) -> None:
        index = {id(slot.param): position for position, slot in enumerate(self._unplanned)}
        eager, late = make_plan(
            self._unplanned,
            [index[key] for key in self._ready_order if key in index],
            self.options,
            f"{self.name}.plan{self._plans}",
        )
        self._eager += eager
        self._late += late
        self._plans += 1
        self._unplanned, self._ready_order = [], {}
