"""Train on ranks that have different numbers of batches, without a hang and without waste."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce, global_process_set

from hvdkit.agreement import format_ranks
from hvdkit.errors import HvdkitError
from hvdkit.torch.collectives import broadcast_object

# What a rank reports before each iteration. Above it: one bit for each optimizer that has
# gradients of an accumulation window still to be reduced.
_HAS_BATCH, _REPEATS, _HAS_NONE, _FAILED = range(4)
_STATES = 4

__all__ = ["UnevenBatches", "uneven_inputs"]


class UnevenBatches(Iterator[Any]):
    """Yields batches until every rank has run out; see ``uneven_inputs``.

    Attributes:
        active: Whether this rank's batch is one of its own. A repeated one counts for
            nothing: weight what it measures by 0.
        active_ranks: How many ranks have a batch of their own in this iteration.
    """

    def __init__(
        self, loader: Iterable[Any], optimizers: Sequence[Any], process_set: ProcessSet
    ) -> None:
        self.active = True
        self.active_ranks = process_set.size()
        self._loader = loader
        self._source: Iterator[Any] | None = None
        self._optimizers = optimizers
        self._process_set = process_set
        self._batch: Any = None
        self._has_batch = False

    def __next__(self) -> Any:
        """Return the next batch of this rank, or its last one again while others go on."""
        state, error = self._fetch()
        states, unreduced = self._exchange(state)
        failed = [
            rank for rank, s in zip(self._process_set.ranks, states, strict=True) if s == _FAILED
        ]
        if failed:
            self.reset()
            raise error or HvdkitError(f"{format_ranks(failed)} failed to read a batch; see there")
        holders = [
            rank for rank, s in zip(self._process_set.ranks, states, strict=True) if s == _HAS_BATCH
        ]
        if len(holders) != self.active_ranks:
            # What was accumulated so far counts with the ranks of its time.
            for optimizer, any_rank in zip(self._optimizers, unreduced, strict=True):
                if any_rank:
                    optimizer.synchronize()
        self.active = state == _HAS_BATCH
        self.active_ranks = len(holders)
        if not holders:
            self.reset()
            raise StopIteration
        if _HAS_NONE in states:
            received = broadcast_object(
                self._batch, holders[0], name="uneven_inputs.batch", process_set=self._process_set
            )
            if state == _HAS_NONE:
                self._batch, self._has_batch = received, True
        for optimizer in self._optimizers:
            optimizer.set_participation(self.active, self.active_ranks)
        return self._batch

    def reset(self) -> None:
        """Let every rank take part in full again."""
        for optimizer in self._optimizers:
            optimizer.set_participation(True, None)

    def _fetch(self) -> tuple[int, Exception | None]:
        try:
            if self._source is None:
                self._source = iter(self._loader)
            self._batch = next(self._source)
        except StopIteration:
            return (_REPEATS if self._has_batch else _HAS_NONE), None
        except Exception as error:
            return _FAILED, error
        self._has_batch = True
        return _HAS_BATCH, None

    def _exchange(self, state: int) -> tuple[list[int], list[bool]]:
        """Return the states of all ranks, and which optimizers have something to reduce."""
        for bit, optimizer in enumerate(self._optimizers):
            state += optimizer.unreduced * (_STATES << bit)
        reports = torch.zeros(self._process_set.size(), dtype=torch.int64)
        reports[self._process_set.rank()] = state
        reports = allreduce(
            reports, op=Sum, name="hvdkit.uneven_inputs", process_set=self._process_set
        )
        unreduced = [
            bool((reports & (_STATES << bit)).any()) for bit in range(len(self._optimizers))
        ]
        return (reports % _STATES).tolist(), unreduced


@contextmanager
def uneven_inputs(
    loader: Iterable[Any],
    optimizer: Any = (),
    process_set: ProcessSet = global_process_set,
) -> Iterator[UnevenBatches]:
    """Iterate over batches equally often on every rank, however many each one has.

    ::

        with hvd.uneven_inputs(loader, optimizer) as batches:
            for batch, target in batches:
                ...  # forward, backward, optimizer.step(), any collective

    A rank that has run out repeats its last batch (one that never had any gets one of another
    rank) while the others go on, so that any collective in the loop finds every rank. Its
    gradients count as zero, and means are over the ranks with a batch of their own. Layers
    that compute over the batch themselves, such as batch norm, do see the repeats. One tiny
    all-reduce an iteration; a loader that fails on one rank ends the loop on all.

    Collective: every rank of ``process_set`` must enter, and leave the loop in the same
    iteration.

    Args:
        loader: This rank's batches. To hand one to a rank without any it must be picklable.
        optimizer: The distributed optimizer, or several, that step in the loop.
        process_set: The ranks that train together.

    Raises:
        HvdkitError: If an optimizer is not one of ``hvdkit.torch.DistributedOptimizer``, or
            another rank's loader failed.
    """
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for candidate in optimizers:
        if not hasattr(candidate, "set_participation"):
            raise HvdkitError(
                f"uneven_inputs needs optimizers wrapped by hvdkit.torch.DistributedOptimizer, "
                f"got a {type(candidate).__name__}"
            )
    batches = UnevenBatches(loader, optimizers, process_set)
    try:
        yield batches
    finally:
        batches.reset()
