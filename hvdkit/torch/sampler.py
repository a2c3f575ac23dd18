"""A sampler that gives every rank its share of a dataset, and can go on in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from horovod.torch.mpi_ops import ProcessSet, global_process_set
from torch.utils.data import IterableDataset, Sampler

from hvdkit.errors import HvdkitError
from hvdkit.sharding import (
    check_shardable,
    count_samples,
    order_epoch,
    shard_indices,
    shard_positions,
)

__all__ = ["ShardedSampler", "shard"]


def shard(
    dataset: Any,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    process_set: ProcessSet = global_process_set,
) -> ShardedSampler:
    """Return a sampler of this rank's share; see ``ShardedSampler``.

    ``DataLoader(dataset, batch_size, sampler=hvd.shard(dataset))``
    """
    return ShardedSampler(dataset, shuffle, seed, drop_last, process_set)


class ShardedSampler(Sampler[int]):
    """Yields the indices of this rank's samples; every rank gets the same number of them.

    An epoch is one order of the dataset, a function of ``seed`` and ``epoch`` alone. Its i-th
    sample goes to rank ``i % workers``, so the ranks' batches of one step are together the
    batch of a single process. The last step is filled up with the epoch's first samples, or
    left out with ``drop_last``.

    Call ``set_epoch`` before every epoch: it reshuffles. To go on in the middle of one, tell
    the sampler what training has used (a ``DataLoader`` with workers draws indices long before
    their batches arrive, so the sampler cannot know by itself)::

        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch, target in loader:
                ...  # one training step
                sampler.advance(len(batch))
                store.save(step, model, optimizer, sampler=sampler.state_dict())

    ``load_state_dict`` then makes the loop go on behind the last sample that was used, also
    with another number of workers.

    Args:
        dataset: Anything with a length; only that is used.
        shuffle: False keeps the dataset's order.
        seed: The same on every rank.
        drop_last: Leave out the samples of an incomplete last step, rather than repeat some.
        process_set: The ranks that share the dataset.

    Raises:
        HvdkitError: If the dataset has no length, or fewer samples than there are ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.length = _measure(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.process_set = process_set
        self.epoch = 0
        self._position = 0  # global: samples of this epoch that training has used, on all ranks
        self._gathered = 0  # global: where in the epoch the next batch to gather begins
        check_shardable(self.length, process_set.size())

    def __len__(self) -> int:
        """Samples that the next iteration yields on each rank."""
        return self._count(self._position) or self._count(0)

    def __iter__(self) -> Iterator[int]:
        """Start at the current position; at its end an epoch starts over."""
        if self._count(self._position) == 0:
            self._position = 0
        # All of this runs now, not with the first sample: prefetching must not move it.
        self._gathered = self._position
        positions = shard_positions(
            self.length,
            self.process_set.rank(),
            self.process_set.size(),
            start=self._position,
            drop_last=self.drop_last,
        )
        order = order_epoch(self.length, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        return iter(shard_indices(order, positions))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch and go to its start.

        The epoch that ``load_state_dict`` restored keeps its position.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._position = 0

    def advance(self, samples: int) -> None:
        """Count samples as used by training.

        Args:
            samples: This rank's; the other ranks used as many in the same steps.
        """
        if samples < 0:
            raise HvdkitError(f"training cannot use {samples} samples")
        self._position += samples * self.process_set.size()

    def state_dict(self) -> dict[str, int]:
        """Return where in which epoch training stands; the same on every rank.

        At the end of an epoch that is the start of the next.
        """
        epoch, position = self._go_past_end(self.epoch, self._position)
        return {"epoch": epoch, "position": position, "seed": self.seed, "length": self.length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state_dict`` was taken, possibly with another number of workers.

        Raises:
            HvdkitError: If the state is of a dataset of another length.
        """
        if state["length"] != self.length:
            raise HvdkitError(
                f"the sampler's state is of a dataset with {state['length']} samples, this one "
                f"has {self.length}; start the epoch over, or bring back the same data"
            )
        self.seed = state["seed"]
        self.epoch, self._position = self._go_past_end(state["epoch"], state["position"])

    def claim_gathered(self, rows: int) -> int:
        """Say how many of the next ``rows`` rows of an epoch are no padding (for ``gather``)."""
        start = self._gathered
        self._gathered += rows
        return max(0, min(rows, self.length - start))

    def _count(self, start: int) -> int:
        return count_samples(
            self.length, self.process_set.size(), start=start, drop_last=self.drop_last
        )

    def _go_past_end(self, epoch: int, position: int) -> tuple[int, int]:
        return (epoch, position) if self._count(position) else (epoch + 1, 0)


def _measure(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise HvdkitError(
            f"{kind} is an IterableDataset, which only it can share out: let its __iter__ yield "
            "every hvd.size()-th sample from the hvd.rank()-th on, give DataLoader no sampler, "
            "and train inside hvd.uneven_inputs"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise HvdkitError(f"{kind} has no length, which sharing it out needs: {error}") from error
