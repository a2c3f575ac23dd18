"""Shares of data for ``tf.data``: as many steps on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as tf

from hvdkit.errors import HvdkitError
from hvdkit.sharding import check_shardable, count_samples, find_length
from hvdkit.tensorflow.keras import demand_equal_entries

__all__ = ["measure", "order_epochs", "shard"]


def shard(
    dataset: Any,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    process_set: Any = _horovod.global_process_set,
    *,
    shuffle_buffer: int = 10_000,
) -> Any:
    """Return this rank's share as a ``tf.data.Dataset``, of the same length on every rank.

    ``hvd.shard((images, labels)).batch(32)``

    An epoch is one order of all elements, a function of ``seed`` and the epoch alone. Its i-th
    element goes to rank ``i % workers``, so the ranks' batches of one step are together the
    batch of a single process, and the last, short, batch is as short on every rank. The last
    elements are filled up with the epoch's first, or left out with ``drop_last``.

    Every iteration is the next epoch, from 0 on, as in ``model.fit``. ``set_epoch(epoch)`` of
    what is returned chooses the next one, which a run that goes on from a checkpoint needs.

    Collective: every rank of ``process_set`` must call, and iterate as often as the others.

    Args:
        dataset: Arrays or tensors, or a tuple or dict of them, of the same length; names of
            files, of which this rank's are returned, to be read by
            ``interleave(tf.data.TFRecordDataset)``; or a ``tf.data.Dataset`` of single elements
            and known length in a deterministic order, which every rank reads as a whole.
        shuffle: False keeps the order.
        seed: The same on every rank.
        drop_last: Leave out the elements of an incomplete last step, rather than repeat some.
        process_set: The ranks that share the data.
        shuffle_buffer: Elements of a ``tf.data.Dataset`` that are shuffled at a time; all of
            arrays and of file names are.

    Raises:
        HvdkitError: On every rank, if the length is not known, or there are fewer elements than
            ranks.
        RankDisagreementError: Ranks hold data of other lengths, other files or options.
    """
    ranks = process_set.ranks
    demand_equal_entries(
        "Data that is shared out",
        _describe(dataset, shuffle, seed, drop_last),
        name="shard",
        process_set=process_set,
    )
    length = measure(dataset)
    check_shardable(length, len(ranks))
    order = order_epochs(dataset, shuffle, shuffle_buffer)
    per_rank = count_samples(length, len(ranks), drop_last=drop_last)
    epoch = tf.Variable(0, dtype=tf.int64, trainable=False)

    def start(_: Any) -> Any:
        now = tf.identity(epoch.read_value())
        with tf.control_dependencies([now]):
            following = epoch.assign_add(1)
        with tf.control_dependencies([following]):
            elements = order(tf.stack([tf.constant(seed, tf.int64), now]))
        # Wraps round: what is missing in the last step comes from the epoch's start.
        whole = elements.concatenate(elements.take(per_rank * len(ranks) - length))
        return whole.take(per_rank * len(ranks)).shard(len(ranks), process_set.rank())

    shares = tf.data.Dataset.range(1).flat_map(start)
    shares = shares.apply(tf.data.experimental.assert_cardinality(per_rank))
    shares.set_epoch = epoch.assign
    return shares


def order_epochs(
    dataset: Any, shuffle: bool, shuffle_buffer: int
) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """Return a function that gives the elements of an epoch in its order.

    Args:
        dataset: What ``shard`` takes.
        shuffle: False keeps the order.
        shuffle_buffer: Elements of a ``tf.data.Dataset`` that are shuffled at a time.

    Returns:
        A function of an int64 tensor, the seed and the epoch, to be called in a graph.
    """
    length = measure(dataset)
    if isinstance(dataset, tf.data.Dataset):
        return _order_dataset(dataset, min(shuffle_buffer, length) if shuffle else 0)
    return _order_arrays(_to_arrays(dataset), length, shuffle)


def _order_arrays(
    arrays: Any, length: int, shuffle: bool
) -> Callable[[tf.Tensor], tf.data.Dataset]:
    def order(seed: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(length, dtype=tf.int64)
        if shuffle:
            indices = tf.random.experimental.stateless_shuffle(indices, seed)
        return tf.data.Dataset.from_tensor_slices(indices).map(
            lambda index: tf.nest.map_structure(lambda array: tf.gather(array, index), arrays)
        )

    return order


def _order_dataset(
    dataset: tf.data.Dataset, buffer_size: int
) -> Callable[[tf.Tensor], tf.data.Dataset]:
    def order(seed: tf.Tensor) -> tf.data.Dataset:
        if not buffer_size:
            return dataset
        # tf.random.set_seed mixes a seed of its own in, which may not be the same on every rank.
        tf.compat.v1.get_default_graph().seed = None
        number = tf.random.stateless_uniform([], seed, 0, tf.int64.max, tf.int64)
        return dataset.shuffle(buffer_size, seed=number, reshuffle_each_iteration=False)

    return order


def _describe(
    dataset: Any, shuffle: bool, seed: int, drop_last: bool
) -> list[tuple[str, str]] | HvdkitError:
    try:
        entries = [("length", str(measure(dataset)))]
    except HvdkitError as error:
        return error
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    entries += [(name, str(value)) for name, value in options.items()]
    if _is_files(dataset):
        entries += [(f"file {i}", os.fspath(name)) for i, name in enumerate(dataset)]
    return entries


def _is_files(dataset: Any) -> bool:
    return isinstance(dataset, Sequence) and all(
        isinstance(name, str | os.PathLike) for name in dataset
    )


def _to_arrays(dataset: Any) -> Any:
    if _is_files(dataset):
        return tf.constant([os.fspath(name) for name in dataset])
    return tf.nest.map_structure(tf.convert_to_tensor, dataset)


def measure(dataset: Any) -> int:
    """Return how many elements there are in what ``shard`` takes.

    Raises:
        HvdkitError: If that is not known, or lengths differ.
    """
    if _is_files(dataset):
        return len(dataset)
    if isinstance(dataset, tf.data.Dataset):
        length = int(dataset.cardinality())
        if length < 0:
            known = "is infinite" if length == tf.data.INFINITE_CARDINALITY else "is not known"
            raise HvdkitError(
                f"the dataset's length {known}, which sharing it out needs: share before "
                "repeat(), or tell it with apply(tf.data.experimental.assert_cardinality(n))"
            )
        return length
    return find_length(array.shape for array in tf.nest.flatten(_to_arrays(dataset)))
