"""A share of what an epoch has left, for this rank, however the workers change."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.epoch_position import EpochPosition
from hvdkit.keras.backend import hvd
from hvdkit.sharding import (
    check_shardable,
    find_length,
    order_epoch,
    shard_indices,
    shard_positions,
)

__all__ = ["ElasticShard"]


class ElasticShard:
    """Deals arrays to the workers of now, from where training stands on.

    ::

        shard = hvd.elastic.ElasticShard((inputs, targets))
        state = hvd.elastic.KerasState(model, shard=shard)

        @hvd.elastic.run
        def train(state):
            while state.shard.epoch < epochs:
                inputs, targets = state.shard.rest()
                ...  # train on batches of them, advance() and commit() after each

    Every epoch is one order of all samples, a function of ``seed`` and the epoch alone; its i-th
    sample goes to rank ``i % workers``. In a state of ``hvd.elastic`` the position is committed
    with the model, so every sample counts once an epoch. Making one is no collective: who joins
    an elastic job does it alone.

    Args:
        data: A NumPy array, or a tuple or dict of them, of the same length.
        shuffle: False keeps the order.
        seed: The same on every rank.
        drop_last: Leave out the samples that do not go round at the end of an epoch, rather than
            repeat some.

    Raises:
        HvdkitError: If lengths differ.
    """

    def __init__(
        self, data: Any, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        self._data = self._prepare(data)
        self.shuffle = shuffle
        self._at = EpochPosition(self._measure(), seed, drop_last)

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0; after the last batch of one it is the next."""
        return self._at.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that training has used, on all ranks."""
        return self._at.position

    def __len__(self) -> int:
        """Samples that ``rest`` has for this rank, as many as for every other."""
        return self._at.left(hvd.size())

    def rest(self) -> Any:
        """Return this rank's share of what the epoch has left.

        Raises:
            HvdkitError: If there are fewer samples than ranks.
        """
        length, workers = self._at.length, hvd.size()
        check_shardable(length, workers)
        order = order_epoch(length, seed=self._at.seed, epoch=self.epoch, shuffle=self.shuffle)
        positions = shard_positions(
            length, hvd.rank(), workers, start=self.position, drop_last=self._at.drop_last
        )
        chosen = shard_indices(order, positions)
        return keras.tree.map_structure(lambda array: array[chosen], self._data)

    def advance(self, samples: int) -> None:
        """Count samples as used by training.

        Args:
            samples: This rank's; the other ranks used as many in the same steps.
        """
        self._at.advance(samples, hvd.size())

    def state_dict(self) -> dict[str, int]:
        """Return where in which epoch training stands; the same on every rank."""
        return self._at.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state_dict`` was taken, possibly with another number of workers.

        Raises:
            HvdkitError: If the state is of data of another length.
        """
        self._at.load_state_dict(state, hvd.size())

    def _prepare(self, data: Any) -> Any:
        return keras.tree.map_structure(np.asarray, data)

    def _measure(self) -> int:
        return find_length(array.shape for array in keras.tree.flatten(self._data))
