"""Shares of arrays for ``fit``, on either backend: as many samples on every rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.errors import HvdkitError
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import hvd
from hvdkit.sharding import (
    check_shardable,
    find_length,
    order_epoch,
    shard_indices,
    shard_positions,
)

__all__ = ["shard"]


def shard(
    arrays: Any,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Return this rank's share of arrays, of the same length on every rank.

    ``inputs, targets = hvd.shard((inputs, targets))``

    The i-th sample of one order, the same on every rank, goes to rank ``i % workers``: what ranks
    take in one step of ``fit`` without its own shuffling is together the batch of a single
    process. The last samples are filled up with the first, or left out with ``drop_last``. A rank
    keeps its samples for all epochs; ``hvdkit.tensorflow.shard`` deals them anew in each.

    Collective: every rank of ``process_set`` must call.

    Args:
        arrays: A NumPy array, or a tuple or dict of them, of the same length.
        shuffle: False keeps the order.
        seed: Of the order; the same on every rank.
        drop_last: Leave out the samples that do not go round, rather than repeat some.
        process_set: The ranks that share the data.

    Returns:
        Arrays in the structure of ``arrays``.

    Raises:
        HvdkitError: On every rank, if lengths differ or there are fewer samples than ranks.
        RankDisagreementError: Ranks hold data of other lengths, or options.
    """
    arrays = keras.tree.map_structure(np.asarray, arrays)
    ranks = process_set.ranks
    demand_equal_entries(
        "Data that is shared out",
        _describe(arrays, shuffle, seed, drop_last),
        name="shard",
        process_set=process_set,
    )
    length = _measure(arrays)
    check_shardable(length, len(ranks))
    order = order_epoch(length, seed=seed, epoch=0, shuffle=shuffle)
    positions = shard_positions(length, process_set.rank(), len(ranks), drop_last=drop_last)
    chosen = shard_indices(order, positions)
    return keras.tree.map_structure(lambda array: array[chosen], arrays)


def _measure(arrays: Any) -> int:
    return find_length(array.shape for array in keras.tree.flatten(arrays))


def _describe(
    arrays: Any, shuffle: bool, seed: int, drop_last: bool
) -> list[tuple[str, str]] | HvdkitError:
    try:
        length = _measure(arrays)
    except HvdkitError as error:
        return error
    options = {"length": length, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    return [(name, str(value)) for name, value in options.items()]
