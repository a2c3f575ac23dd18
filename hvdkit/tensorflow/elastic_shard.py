"""``ElasticShard`` for ``tf.data``: arrays, files, and pipelines."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as tf

from hvdkit.sharding import check_shardable
from hvdkit.tensorflow.data import measure, order_epochs
from hvdkit.tensorflow.keras import ElasticShard as _ElasticShard

__all__ = ["ElasticShard"]


class ElasticShard(_ElasticShard):
    """Deals elements to the workers of now, from where training stands on.

    ::

        shard = hvd.elastic.ElasticShard((images, labels))
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, shard=shard)

        @hvd.elastic.run
        def train(state):
            while state.shard.epoch < epochs:
                for batch in state.shard.rest().batch(32):
                    ...  # one training step
                    state.shard.advance(len(batch[0]))
                    state.commit()

    As ``hvd.elastic.ElasticShard`` of ``hvdkit.keras``, and of whatever ``hvd.shard`` takes:
    arrays, names of files, or a ``tf.data.Dataset`` of single elements and known length in a
    deterministic order, of which every rank reads what comes before its share as well.

    Args:
        data: As for ``hvd.shard``.
        shuffle: False keeps the order.
        seed: The same on every rank.
        drop_last: Leave out the elements that do not go round at the end of an epoch, rather
            than repeat some.
        shuffle_buffer: Elements of a ``tf.data.Dataset`` that are shuffled at a time.

    Raises:
        HvdkitError: If the length is not known, or lengths differ.
    """

    def __init__(
        self,
        data: Any,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        shuffle_buffer: int = 10_000,
    ) -> None:
        self._shuffle_buffer = shuffle_buffer
        super().__init__(data, shuffle, seed, drop_last)

    def rest(self) -> Any:
        """Return this rank's share of what the epoch has left, as a ``tf.data.Dataset``.

        Raises:
            HvdkitError: If there are fewer elements than ranks.
        """
        workers, left = _horovod.size(), len(self)
        check_shardable(self._at.length, workers)
        order = order_epochs(self._data, self.shuffle, self._shuffle_buffer)
        missing = self.position + left * workers - self._at.length

        def start(_: Any) -> Any:
            elements = order(tf.constant([self._at.seed, self.epoch], tf.int64))
            # Wraps round: what is missing in the last step comes from the epoch's start.
            whole = elements.concatenate(elements.take(max(0, missing)))
            rest = whole.skip(self.position).take(left * workers)
            return rest.shard(workers, _horovod.rank())

        # In a graph, where no seed of the process is mixed into the order.
        mine = tf.data.Dataset.range(1).flat_map(start)
        return mine.apply(tf.data.experimental.assert_cardinality(left))

    def _prepare(self, data: Any) -> Any:
        return data

    def _measure(self) -> int:
        return measure(self._data)
