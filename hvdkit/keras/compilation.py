"""Keep the training step out of XLA, which has no Horovod operations on CPU.

Keras compiles with XLA by default (``jit_compile="auto"``) where every layer allows it. It knows
layers that do not, but not optimizers; here a distributed optimizer counts like such a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras.src.trainers import trainer as keras_trainer

from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import is_tensorflow

__all__ = ["keep_out_of_xla"]


@functools.cache
def keep_out_of_xla(is_distributed: Callable[[object], bool]) -> None:
    """Make ``Model.compile`` choose no XLA for a distributed optimizer, and refuse to be told to.

    Changes Keras's trainer once; models with other optimizers are compiled as before.
    """
    if not is_tensorflow():
        return
    trainer: Any = keras_trainer.Trainer
    supports_jit, setter = keras_trainer.model_supports_jit, trainer.jit_compile.fset

    def model_supports_jit(model: Any) -> bool:
        if is_distributed(getattr(model, "optimizer", None)):
            return False
        return bool(supports_jit(model))

    def set_jit_compile(self: Any, value: Any) -> None:
        if value and is_distributed(getattr(self, "optimizer", None)):
            raise HvdkitError(
                "jit_compile=True cannot work with a distributed optimizer: XLA has no Horovod "
                "operations; leave jit_compile at 'auto', or compile parts of the model with "
                "tf.function(jit_compile=True)"
            )
        setter(self, value)

    keras_trainer.model_supports_jit = model_supports_jit
    trainer.jit_compile = trainer.jit_compile.setter(set_jit_compile)
