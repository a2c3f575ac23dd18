"""Keep the training step out of XLA, which has no Horovod operations on CPU.

Keras compiles with XLA by default (``jit_compile="auto"``) where every layer allows it. It knows
layers that do not, but not optimizers; here a distributed optimizer counts like such a layer, be
it wrapped before ``compile`` or after.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras.src.trainers import trainer as keras_trainer

from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import is_tensorflow
from hvdkit.keras.distribution import find_distribution

__all__ = ["keep_out_of_xla"]


@functools.cache
def keep_out_of_xla() -> None:
    """Make models with a distributed optimizer choose no XLA, and refuse to be told to.

    Changes Keras's trainer once; models with other optimizers are compiled as before.
    """
    trainer: Any = keras_trainer.Trainer
    supports_jit, jit_compile = keras_trainer.model_supports_jit, trainer.jit_compile

    def model_supports_jit(model: Any) -> bool:
        return _find(model) is None and bool(supports_jit(model))

    def get_jit_compile(self: Any) -> Any:
        # Decided in compile(), when the optimizer may not have been distributed yet.
        return jit_compile.fget(self) and _find(self) is None

    def set_jit_compile(self: Any, value: Any) -> None:
        if value and _find(self) is not None:
            compiler = "XLA" if is_tensorflow() else "torch.compile"
            raise HvdkitError(
                f"jit_compile=True cannot work with a distributed optimizer: {compiler} has no "
                f"Horovod operations; leave jit_compile at 'auto', or compile parts of the model "
                f"by themselves"
            )
        jit_compile.fset(self, value)

    keras_trainer.model_supports_jit = model_supports_jit
    trainer.jit_compile = property(get_jit_compile, set_jit_compile)
    _retrace_when_distributed()


def _find(model: Any) -> Any:
    return find_distribution(getattr(model, "optimizer", None))


def _retrace_when_distributed() -> None:
    """Make ``fit`` build its step anew if the optimizer was wrapped since it was built.

    The step that TensorFlow traced before would go on without the reduction.
    """
    trainer: Any = next(c for c in keras.Model.__mro__ if "make_train_function" in vars(c))
    make = trainer.make_train_function

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        # A model that is wrapped from the start has no such attribute while None is right.
        made_for = vars(self).get("_hvdkit_made_for")
        distribution = _find(self)
        stale = made_for is not distribution
        object.__setattr__(self, "_hvdkit_made_for", distribution)
        return make(self, force or stale)

    trainer.make_train_function = make_train_function
