"""What elastic states have in common: shares of data, and what follows the number of workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HorovodInternalError

from hvdkit.elastic import choose_passes, rate_change
from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import hvd, is_tensorflow
from hvdkit.keras.distribution import find_distribution
from hvdkit.keras.elastic_shard import ElasticShard

__all__ = ["ElasticParts", "raise_losses"]


def raise_losses(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``function`` raise HorovodInternalError where TensorFlow tells of a lost rank.

    Horovod does so for what a training function raises, for one kind of error; not while the
    state is synchronized, and not for operations that were queued when the rank was lost.
    """
    if not is_tensorflow():
        return function
    import tensorflow as tf

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
            if "Horovod" not in error.message:
                raise
            raise HorovodInternalError(error.message) from error

    return wrapper


class ElasticParts(ObjectState):  # type: ignore[misc, unused-ignore]
    """Adds to an elastic state: shards that are kept by their position, rates, and passes.

    Comes before the class that keeps the variables; that one's ``__init__`` gets what
    ``_adopt`` returns.
    """

    _size: dict[str, int]

    def _adopt(
        self, optimizer: Any, learning_rate_rule: str, keep_global_batch: bool, values: Any
    ) -> dict[str, Any]:
        """Take what is kept here out of ``values``, and return the rest."""
        rate_change(1, 1, learning_rate_rule)
        self._learning_rate_rule = learning_rate_rule
        self._keep_global_batch = keep_global_batch
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        if learning_rate_rule != "none":
            _demand_number(self._inner)
        if keep_global_batch:
            _demand_means(self._inner)
        self._shards = {n: v for n, v in values.items() if isinstance(v, ElasticShard)}
        for name, shard in self._shards.items():
            setattr(self, name, shard)
        self._save_shards()
        passes = self._count_passes()
        batches = hvd.size() * passes
        # Rank 0's go to those who join, as every other value.
        size = {"batches": batches, "kept": batches, "passes": passes}
        return {n: v for n, v in values.items() if n not in self._shards} | {"_size": size}

    def save(self) -> None:
        """Keep all values as they are."""
        self._save_shards()
        super().save()

    def restore(self) -> None:
        """Go back to the values that were kept."""
        super().restore()
        for name, shard in self._shards.items():
            shard.load_state_dict(self._saved_shards[name])

    def sync(self) -> None:
        """Take over rank 0's values, and count them as kept.

        Collective: every rank must call.
        """
        ObjectState.save(self)  # values of now, as those of the variables are
        super().sync()
        for name, shard in sorted(self._shards.items()):
            state = hvd.broadcast_object(shard.state_dict(), name=f"elastic.{name}")
            shard.load_state_dict(state)
        self._follow_size()
        self.save()

    def reset(self) -> None:
        """Adapt to the workers of now; called after each change of them."""
        super().reset()
        for shard in self._shards.values():
            shard.load_state_dict(shard.state_dict())  # fewer may be too few to go round
        self._follow_size()

    def _save_shards(self) -> None:
        self._saved_shards = {name: shard.state_dict() for name, shard in self._shards.items()}

    def _count_passes(self) -> int:
        return getattr(self._inner, "gradient_accumulation_steps", None) or 1

    def _follow_size(self) -> None:
        passes = self._size["passes"]
        if self._keep_global_batch:
            passes = choose_passes(self._size["kept"], hvd.size())
            self._set_passes(self._size["passes"], passes)
        batches = hvd.size() * passes
        change = rate_change(self._size["batches"], batches, self._learning_rate_rule)
        if change != 1.0:
            rate = float(keras.ops.convert_to_numpy(self._inner.learning_rate))
            self._inner.learning_rate = rate * change
        self._size = {**self._size, "batches": batches, "passes": passes}

    def _set_passes(self, before: int, after: int) -> None:
        """Change the passes of a step; the optimizer counts passes, of which steps follow."""
        if before != after:
            counter = self._inner._iterations
            steps, begun = divmod(int(keras.ops.convert_to_numpy(counter)), before)
            counter.assign(steps * after + min(begun, after - 1))
        if self._count_passes() != after:
            self._inner.gradient_accumulation_steps = after
            model = getattr(self, "model", None)
            if model is not None:
                model.train_function = None  # has the number as a constant


def _demand_number(optimizer: Any) -> None:
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) or callable(rate):
        raise HvdkitError(
            f"learning_rate_rule scales a number, and the optimizer's rate is a "
            f"{type(rate).__name__}: use callbacks that set the rate, or learning_rate_rule='none'"
        )


def _demand_means(optimizer: Any) -> None:
    distribution = find_distribution(optimizer)
    if not getattr(optimizer, "gradient_accumulation_steps", None) or (
        distribution is not None and distribution.passes_to_sum > 1
    ):
        raise HvdkitError(
            "keep_global_batch changes how many passes are accumulated, of which the optimizer "
            "must take the mean: wrap it with hvd.DistributedOptimizer(..., "
            "backward_passes_per_step=2 or more, average_aggregated_gradients=True)"
        )
