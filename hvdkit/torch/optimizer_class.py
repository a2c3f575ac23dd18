"""The class that a wrapped optimizer gets in front of its own: what its ``step`` does beside."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from horovod.torch.mpi_ops import Average, ProcessSet, allreduce
from torch.utils.hooks import RemovableHandle

from hvdkit import trace
from hvdkit.torch.adasum import combine_updates
from hvdkit.torch.agreement import demand_equal_entries
from hvdkit.torch.clip import clip_gradients
from hvdkit.torch.hyper_parameters import ADVICE
from hvdkit.torch.reducer import GradientReducer

__all__ = ["UpdateGuard", "call_after_steps", "is_distributed", "prepend_class"]


class _Distributed:
    """What a wrapped optimizer's class has in front of its own; made by ``prepend_class``."""

    _reducer: GradientReducer
    _clip_grad_norm: float | None
    _combines_updates: bool
    _after_step: OrderedDict[int, Callable[[], None]]
    _agreed: bool  # for Adasum, which has no plan that would compare
    _health: UpdateGuard | None
    _parameter_names: dict[int, str]
    _synchronize_in_step = True

    # -- what Horovod's optimizer has ------------------------------------------------------

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that make up one step."""
        return self._reducer.options.backward_passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes make up one step, from the next pass on."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
        self._reducer.options.backward_passes_per_step = passes

    @property
    def op(self) -> Any:
        """The reduction, ``hvd.Average`` or ``hvd.Sum``."""
        return self._reducer.options.op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that gradients are reduced over."""
        return self._reducer.options.process_set

    def synchronize(self) -> None:
        """Reduce whatever is not reduced yet, so that gradients may be read or changed.

        Only needed for an incomplete accumulation window: gradients of a complete one are
        reduced when ``backward()`` returns.

        Collective: every rank must call.
        """
        self._reducer.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` take gradients as they are; for use after ``synchronize()``."""
        self._synchronize_in_step = False
        try:
            yield
        finally:
            self._synchronize_in_step = True

    # -- what hvdkit adds ------------------------------------------------------------------

    def no_sync(self) -> Any:
        """Return a context in which backward passes accumulate without reducing.

        The first backward pass after it, or ``step()``, reduces what has accumulated.
        """
        return self._reducer.no_sync()

    @property
    def unreduced(self) -> bool:
        """Whether backward passes added to gradients since they were last reduced."""
        return self._reducer.unreduced

    def set_participation(self, active: bool, active_ranks: int | None) -> None:
        """Set whether this rank's gradients count, and over how many ranks the mean is.

        ``uneven_inputs`` calls it. ``active_ranks`` must be equal on all ranks; None is all.
        """
        self._reducer.set_participation(active, active_ranks)

    # -- what torch.optim.Optimizer has ----------------------------------------------------

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._reducer.end_window()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        self._adopt()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or pickle is the plain optimizer: wrapping is a collective, copying is not,
        # and the file opens where hvdkit is not installed.
        plain: Any = object.__new__(_inner_class(type(self)))
        plain.__dict__.update(self.__dict__)
        for key in (*_Distributed.__annotations__, "step"):
            plain.__dict__.pop(key, None)
        make, arguments, *rest = plain.__reduce_ex__(protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make = object.__new__  # pickle takes the other for objects of the same class only
        return (make, arguments, *rest)

    # -- inside ----------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Let the reducer follow what has become trainable since it last looked."""
        reducer = self._reducer
        for i, group in enumerate(self.param_groups):  # type: ignore[attr-defined]
            for j, param in enumerate(group["params"]):
                if param.requires_grad and not reducer.knows(param):
                    reducer.adopt(self._parameter_names.get(id(param), f"group{i}.{j}"), param)

    def _prepare_step(self) -> bool:
        """Make gradients final; return whether they may be applied."""
        self._adopt()
        if self._synchronize_in_step:
            self._reducer.finish()
        if self._health is not None and not self._health.permits_update():
            return False
        if self._clip_grad_norm is not None:
            clip_gradients(self, self._clip_grad_norm)
        return True

    def _agree(self) -> None:
        """Compare hyper-parameters once, before the first step."""
        if not self._agreed:
            demand_equal_entries(
                "The optimizer",
                self._reducer.options.describe_optimizer(),
                name=f"{self._reducer.name}.hyper_parameters",
                process_set=self.process_set,
                advice=ADVICE,
            )
            self._agreed = True

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run a closure and reduce what it leaves; the loss is the mean over the ranks."""
        with torch.enable_grad():
            loss = closure()
        permitted = self._prepare_step()
        self._reducer.end_window()
        if loss is not None and not self._reducer.alone:
            # An optimizer that decides by the loss (LBFGS) must decide alike on every rank.
            mean = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
            mean = allreduce(
                mean, name=f"{self._reducer.name}.loss", op=Average, process_set=self.process_set
            )
            loss = mean.to(loss.dtype) if isinstance(loss, torch.Tensor) else float(mean)
        if not permitted:
            raise _UpdateSkipped(loss)
        return loss

    def _end_step(self) -> None:
        self._reducer.end_window()
        trace.end_step()
        if self._health is not None:
            self._health.end_step()
        for act in tuple(self._after_step.values()):
            act()


class _UpdateSkipped(Exception):
    """Leaves an optimizer's own step between its closure and its update."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class UpdateGuard(Protocol):
    """What may forbid updates; ``HealthMonitor`` is one. Every rank must come to the same."""

    steps: int

    def permits_update(self) -> bool:
        """Whether the final gradients may be applied; may raise."""

    def end_step(self) -> None:
        """A step has ended, with or without an update."""

    def end_step_without_update(self) -> None:
        """``GradScaler`` has left out the update."""


def _make_step(inner: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    @functools.wraps(inner.step)
    def step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        if closure is not None:
            args = (functools.partial(self._evaluate, closure), *args)
        elif not self._prepare_step():
            self._end_step()
            return None
        update = functools.partial(inner.step, self, *args, **kwargs)
        try:
            if self._combines_updates:
                self._agree()
                result = combine_updates(self, update, f"{self._reducer.name}.update")
            elif closure is not None:
                result = update()
            else:
                trace.begin("update")
                result = update()
                trace.end("update")
        except _UpdateSkipped as skipped:
            result = skipped.loss
        self._end_step()
        return result

    # The inner step runs the optimizer's step hooks; this one must not run them again.
    step.hooked = True  # type: ignore[attr-defined]
    return step


@functools.cache
def _distributed_class(inner: Any) -> type:
    return type(
        inner.__name__,
        (_Distributed, inner),
        {"step": _make_step(inner), "__module__": __name__, "__doc__": inner.__doc__},
    )


def _inner_class(cls: type) -> type:
    return cls.__mro__[2]


def prepend_class(
    optimizer: torch.optim.Optimizer,
    reducer: GradientReducer,
    parameter_names: dict[int, str],
    *,
    combines_updates: bool,
    clip_grad_norm: float | None,
) -> None:
    """Give ``optimizer`` a class with a ``step`` in front of its own, and what that needs.

    Args:
        optimizer: Changed in place.
        reducer: Reduces its gradients.
        parameter_names: By the ``id`` of each parameter.
        combines_updates: Whether the ranks' updates are combined, as with op=Adasum, and not
            their gradients.
        clip_grad_norm: The largest 2-norm of all gradients; None: any.
    """
    wrapped: Any = optimizer
    inner: Any = type(optimizer)
    wrapped.__class__ = _distributed_class(inner)
    wrapped._reducer = reducer
    wrapped._parameter_names = parameter_names
    wrapped._combines_updates = combines_updates
    wrapped._clip_grad_norm = clip_grad_norm
    wrapped._agreed = False
    wrapped._after_step = OrderedDict()
    wrapped._health = None
    wrapped._adopt()
    _follow_scheduler(wrapped)


def is_distributed(optimizer: object) -> bool:
    """Whether ``optimizer`` came out of ``DistributedOptimizer``."""
    return isinstance(optimizer, _Distributed)


def call_after_steps(optimizer: torch.optim.Optimizer, act: Callable[[], None]) -> RemovableHandle:
    """Call ``act`` at the end of each step, with op=Adasum after the updates are combined.

    What ``act`` refers to must not hold the optimizer: one that is dropped stops reducing at once.
    """
    if not is_distributed(optimizer):
        return optimizer.register_step_post_hook(lambda *_: act())
    actions = cast(_Distributed, optimizer)._after_step
    handle = RemovableHandle(actions)
    actions[handle.id] = act
    return handle


def _follow_scheduler(optimizer: Any) -> None:
    """Renew the mark that a learning-rate scheduler made before the wrapping left on step()."""
    if not hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        return
    del optimizer.step  # it is bound to the step of the inner class
    step = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        owner: Any = reference()
        owner._opt_called = True
        return step(owner, *args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = tracked
