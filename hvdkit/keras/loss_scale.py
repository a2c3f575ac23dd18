"""Loss scaling over ranks: a non-finite gradient on one rank skips the update on all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from hvdkit.keras.backend import allreduce_tensors

__all__ = ["agree_on_finite"]


@functools.cache
def agree_on_finite(find_distribution: Callable[[object], Any]) -> None:
    """Let ``LossScaleOptimizer`` ask all ranks, where it holds a distributed optimizer.

    Changes the class once, since Keras itself puts a ``LossScaleOptimizer`` around the compiled
    optimizer of a ``mixed_float16`` model.

    Args:
        find_distribution: Returns what makes an optimizer distributed, or None.
    """
    cls: Any = keras.optimizers.LossScaleOptimizer
    local = cls.check_finite

    @functools.wraps(local)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = local(self, grads)
        distribution = find_distribution(self)
        if distribution is None or distribution.alone:
            return finite
        [ranks_with_inf] = allreduce_tensors(
            [1.0 - ops.cast(finite, "float32")],
            [f"{distribution.options.name}.finite"],
            process_set=distribution.options.process_set,
        )
        return ops.equal(ranks_with_inf, 0.0)

    cls.check_finite = check_finite
