"""``DistributedOptimizer``: any PyTorch optimizer, its gradients reduced before the update."""

from __future__ import annotations

import copyreg
import functools
import itertools
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import (
    Adasum,
    Average,
    ProcessSet,
    allreduce,
    global_process_set,
    is_initialized,
)
from torch.utils.hooks import RemovableHandle

from hvdkit import agreement, trace
from hvdkit.errors import HvdkitError
from hvdkit.settings import pick_bucket_bytes
from hvdkit.torch.adasum import combine_updates, demand_adasum
from hvdkit.torch.agreement import demand_equal_entries
from hvdkit.torch.amp import reduce_before_unscaling
from hvdkit.torch.clip import clip_gradients
from hvdkit.torch.collectives import share_errors
from hvdkit.torch.hyper_parameters import ADVICE, describe_hyper_parameters
from hvdkit.torch.parameters import describe_parameters, name_parameters
from hvdkit.torch.plan import ReductionOptions
from hvdkit.torch.reducer import GradientReducer
from hvdkit.torch.wire import Compression

__all__ = ["DistributedOptimizer", "UpdateGuard", "call_after_steps", "is_distributed"]


# Wrapped in the same order on every rank, so the count names the same optimizer on each.
_counter = itertools.count()


class _Distributed:
    """What a wrapped optimizer's class has in front of its own; made by DistributedOptimizer."""

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


def _describe_live(reference: Any) -> list[tuple[str, str]]:
    """List the hyper-parameters of an optimizer that is weakly held."""
    optimizer = reference()
    return [] if optimizer is None else describe_hyper_parameters(optimizer)


def _inner_class(cls: type) -> type:
    return cls.__mro__[2]


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


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_size_mb: float | None = None,
    clip_grad_norm: float | None = None,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Make ``optimizer`` reduce gradients over all ranks before it updates.

    The optimizer itself is changed and returned: it stays an instance of its class, with its
    state, parameter groups, hooks and schedulers. Gradients are reduced while the backward
    pass runs; when ``backward()`` of the last pass of a window returns they are final, so
    clipping, ``torch.amp.GradScaler`` and plain reads work as with one process.

    Collective: every rank must call, with equal arguments, in the same order.

    Args:
        optimizer: Any ``torch.optim.Optimizer``, of torch or your own.
        named_parameters: Usually ``model.named_parameters()``; names appear in errors and
            must be equal on all ranks. All parameters of the optimizer must be named.
        compression: ``Compression.none``, ``fp16``, ``bf16``, or a class with ``compress``
            and ``decompress``, which sees whole buckets.
        backward_passes_per_step: Backward passes that accumulate before one reduction. Their
            gradients add up unless ``average_aggregated_gradients`` is set. ``step()`` before
            the last of them reduces what there is.
        op: ``Average`` (the mean over ranks), ``Sum`` or ``Adasum``.
        gradient_predivide_factor: With ``Average``: divide by it before the sum and by the
            rest after. By default all of the division comes first, which cannot overflow.
        num_groups: Deprecated in Horovod, use ``groups``.
        groups: How many buckets to make, or a list of lists of parameters that share one;
            instead of buckets by size.
        sparse_as_dense: Reduce sparse gradients in the dense buckets.
        process_set: The ranks to reduce over; others train on their own.
        bucket_size_mb: Gradients share flat buffers (buckets) that are closed at this size in
            MiB; the first one at 1 MiB, so that communication starts early. A gradient of half
            the size or more is reduced alone, where it lies. None: what
            ``hvdkit bench allreduce --write-config`` has saved on this machine, else 8.
        clip_grad_norm: Scale gradients to at most this 2-norm, taken over all parameters
            after the reduction and so the same on every rank.
        average_aggregated_gradients: Divide by the passes made, so that k passes equal one
            over k times the batch.

    Returns:
        ``optimizer``, with ``synchronize()``, ``skip_synchronize()``, ``no_sync()`` and
        ``set_backward_passes_per_step()`` beside its own methods.

    Raises:
        ValueError: An argument is out of range or parameters are named wrongly.
        RankDisagreementError: Ranks passed different optimizers, parameters or options.
        HvdkitError: ``hvd.init()`` was not called, or the optimizer is wrapped already.
    """
    if not is_initialized():
        raise HvdkitError("Horovod is not initialized; call hvd.init() before this")
    if num_groups and groups is None:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
    included = process_set.included()
    alone = not included or (process_set.size() == 1 and not elastic)
    inner: Any = type(optimizer)
    name = f"hvdkit.optimizer{next(_counter)}"

    def build() -> tuple[ReductionOptions, list[tuple[str, torch.nn.Parameter]]]:
        if is_distributed(optimizer):
            raise HvdkitError("this optimizer is wrapped already; wrap it once")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the "
                "optimizer, not the model or its parameters"
            )
        options = ReductionOptions(
            op=op,
            process_set=process_set,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups,
            bucket_bytes=pick_bucket_bytes(bucket_size_mb),
            sparse_as_dense=sparse_as_dense,
            sparse_only=isinstance(optimizer, torch.optim.SparseAdam),
        )
        options.validate()
        if op == Adasum and not alone:
            demand_adasum()
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, not {clip_grad_norm}")
        return options, name_parameters(optimizer, named_parameters)

    def describe_wrapping() -> list[tuple[str, str]]:
        return [
            *agreement.describe_versions({"PyTorch": torch.__version__}),
            ("class", f"{inner.__module__}.{inner.__qualname__}"),
            *options.describe(named),
            ("clip_grad_norm", str(clip_grad_norm)),
            ("number of parameters", str(len(named))),
            ("number of parameter groups", str(len(optimizer.param_groups))),
        ]

    if alone or elastic:
        # In an elastic job ranks come and go, and who joins wraps alone; they compare when
        # they first reduce together.
        options, named = build()
    else:
        with share_errors(f"{name}.arguments", process_set):
            options, named = build()
        demand_equal_entries(
            "The optimizer",
            [*describe_wrapping(), *describe_parameters(named)],
            name=f"{name}.agreement",
            process_set=process_set,
        )
    # Hyper-parameters may differ until rank 0 has broadcast those of a checkpoint.
    reference = weakref.ref(optimizer)
    wrapping = describe_wrapping() if elastic else []
    options.describe_optimizer = lambda: [*wrapping, *_describe_live(reference)]
    # Adasum reduces updates in step(); there is nothing to do in the backward pass.
    reducer = GradientReducer(options, name, alone=alone or op == Adasum)
    wrapped: Any = optimizer
    wrapped.__class__ = _distributed_class(inner)
    wrapped._reducer = reducer
    wrapped._combines_updates = op == Adasum and not alone
    wrapped._agreed = False
    wrapped._after_step = OrderedDict()
    wrapped._clip_grad_norm = clip_grad_norm
    wrapped._health = None
    wrapped._parameter_names = {id(param): name for name, param in named}
    wrapped._adopt()
    _follow_scheduler(wrapped)
    reduce_before_unscaling(is_distributed)
    return wrapped


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
