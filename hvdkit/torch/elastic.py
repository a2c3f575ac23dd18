"""Horovod's elastic training: a state that survives when workers come and go.

Where Horovod's own ``TorchState`` would lose something, this one does not: a state that was
synchronized counts as committed, so that a worker which joined and finds itself the only one left
does not start from scratch; an ``ElasticSampler`` deals anew when workers leave in good order;
learning-rate schedulers are kept; gradients of a step that broke off are dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from horovod.common.elastic import ObjectState, run_fn
from horovod.torch.elastic import ElasticSampler
from horovod.torch.elastic import TorchState as _TorchState
from horovod.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from horovod.torch.mpi_ops import init, shutdown, size
from torch.optim.lr_scheduler import LRScheduler

from hvdkit.elastic import choose_passes, rate_change, restart
from hvdkit.errors import HvdkitError
from hvdkit.torch.collectives import broadcast_object
from hvdkit.torch.initial_state import broadcast_initial_state, broadcast_optimizer_state
from hvdkit.torch.optimizer_class import is_distributed
from hvdkit.torch.optimizer_state import apply_state_frame, take_state_apart
from hvdkit.torch.sampler import ShardedSampler
from hvdkit.torch.schedule import multiply_rates

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Any) -> Any:
    """Decorate a training function so that it goes on when workers come or go.

    ``func(state, ...)`` is called again after each change, with the state of the last commit
    where a worker was lost, and with that of the moment where one came or left in good order.
    Collectives belong into it, none before it: who joins would run them alone.

    Args:
        func: Takes a state first, a ``TorchState`` for example.
    """
    return run_fn(func, lambda: restart(shutdown, init))


class TorchState(_TorchState):  # type: ignore[misc, unused-ignore]
    """What all workers hold, kept at each ``commit()`` and given to workers that join.

    ::

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, schedule=schedule)

        @hvd.elastic.run
        def train(state):
            for epoch in range(state.sampler.epoch, epochs):
                state.sampler.set_epoch(epoch)
                for inputs, targets in loader:
                    ...  # one training step
                    state.sampler.advance(len(inputs))
                    state.commit()

    With a ``ShardedSampler`` in it every sample counts once an epoch, however often workers come
    and go: what was trained on after the last commit is forgotten by the model as well, and is
    trained on again. The sampler counts the epochs, since the commit after the last batch of one
    begins the next.

    Args:
        model: A module.
        optimizer: Plain or distributed.
        learning_rate_rule: What learning rates do when the workers change: ``"none"`` leaves
            them alone, as Horovod does; ``"linear"`` and ``"sqrt"`` scale them, and those that
            schedulers hold, with the batch of a step. The rates of now are those for the workers
            of now. Floors of a scheduler (``eta_min``) stay.
        keep_global_batch: Change ``backward_passes_per_step`` so that workers times passes stays
            as near as it can to what it is now. Needs ``average_aggregated_gradients=True``;
            commit after whole steps.
        kwargs: Further models, optimizers, samplers (``hvd.shard(dataset)``), learning-rate
            schedulers and picklable values, which become attributes. Plain values are kept as
            they are: replace lists and dicts rather than change them.

    Raises:
        HvdkitError: If the rule is unknown, or no optimizer can keep the batch.
    """

    _batches: dict[str, int]  # of a step, over all workers; what the rates are made for
    _kept_batches: dict[str, int]

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        learning_rate_rule: str = "none",
        keep_global_batch: bool = False,
        **kwargs: Any,
    ) -> None:
        rate_change(1, 1, learning_rate_rule)
        self._learning_rate_rule = learning_rate_rule
        self._keep_global_batch = keep_global_batch
        named = {"optimizer": optimizer, **kwargs}
        batches = {
            name: size() * _count_passes(value)
            for name, value in named.items()
            if isinstance(value, torch.optim.Optimizer)
        }
        if keep_global_batch:
            _demand_means(named[name] for name in batches)
        # Rank 0's go to those who join, as every other value.
        super().__init__(model, optimizer, _batches=batches, _kept_batches=batches, **kwargs)

    def sync(self) -> None:
        """Give every rank what rank 0 holds, and count it as committed.

        Collective: every rank must call.
        """
        ObjectState.save(self)  # values of now, as those of the model are
        super().sync()
        self._follow_size()
        self.save()

    def reset(self) -> None:
        """Adapt to the workers of now; called after each change of them."""
        super().reset()
        for value in (*self._values(ElasticSampler), *self._values(ShardedSampler)):
            value.load_state_dict(value.state_dict())  # deals anew; an epoch at its end is over
        self._follow_size()

    def _values(self, kind: type) -> Iterator[Any]:
        return (h.value for h in self._handlers.values() if isinstance(h.value, kind))

    def _follow_size(self) -> None:
        changes = {}
        for name, kept in self._kept_batches.items():
            optimizer = getattr(self, name)
            if self._keep_global_batch:
                passes = choose_passes(kept, size())
                if passes != optimizer.backward_passes_per_step:
                    optimizer.set_backward_passes_per_step(passes)
            after = size() * _count_passes(optimizer)
            change = rate_change(self._batches[name], after, self._learning_rate_rule)
            changes[name] = after
            if change != 1.0:
                schedulers = self._values(LRScheduler)
                multiply_rates(
                    optimizer,
                    change,
                    [one for one in schedulers if getattr(one, "optimizer", None) is optimizer],
                )
        self._batches = changes


def _count_passes(optimizer: Any) -> int:
    return optimizer.backward_passes_per_step if is_distributed(optimizer) else 1


def _demand_means(optimizers: Iterator[Any]) -> None:
    found = list(optimizers)
    if not found or not all(
        is_distributed(one) and one._reducer.options.average_aggregated_gradients for one in found
    ):
        raise HvdkitError(
            "keep_global_batch changes how many passes are accumulated, and their sum would grow "
            "with them: give the state optimizers that were wrapped with "
            "hvd.DistributedOptimizer(..., average_aggregated_gradients=True)"
        )


class _ModelHandler(ModelStateHandler):  # type: ignore[misc, unused-ignore]
    value: Any

    def sync(self) -> None:
        broadcast_initial_state(self.value, root_rank=0)


class _OptimizerHandler(OptimizerStateHandler):  # type: ignore[misc, unused-ignore]
    """Copies state as it is: Horovod casts it on the way back, and takes a step to send it."""

    value: Any

    def __init__(self, optimizer: Any) -> None:
        StateHandler.__init__(self, optimizer)
        self.save()

    def save(self) -> None:
        frame, tensors = take_state_apart(self.value)
        self._saved = copy.deepcopy(frame), [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        frame, tensors = self._saved
        places = apply_state_frame(self.value, copy.deepcopy(frame))
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        # What backward passes since then left belongs to a step that never was.
        if is_distributed(self.value):
            self.value._reducer.restart()
        torch.optim.Optimizer.zero_grad(self.value)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class _SchedulerHandler(SamplerStateHandler):  # type: ignore[misc, unused-ignore]
    """Keeps a learning-rate scheduler by its ``state_dict``; it refers to the optimizer."""

    value: Any

    def sync(self) -> None:
        state = broadcast_object(self.value.state_dict(), name="elastic.schedule")
        self.value.load_state_dict(copy.deepcopy(state))


_OURS = [
    (torch.nn.Module, _ModelHandler),
    (torch.optim.Optimizer, _OptimizerHandler),
    (LRScheduler, _SchedulerHandler),
    (ShardedSampler, SamplerStateHandler),
]
set_handler_registry(_OURS + [pair for pair in get_handler_registry() if pair not in _OURS])
