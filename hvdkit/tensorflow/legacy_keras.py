"""Keras 2, the package ``tf_keras``: Horovod's own path, with what it gets wrong there mended.

``TF_USE_LEGACY_KERAS=1`` makes it ``tf.keras``. Horovod's optimizers and callbacks reach it, but
take ``keras.backend`` from Keras 3 and drop ``op`` and ``groups`` on the way from
``horovod.tensorflow``. What hvdkit adds for Keras 3 is not there for it.
"""

from __future__ import annotations

import functools
from typing import Any

import horovod.tensorflow.keras as _horovod
import tensorflow as tf
from horovod.tensorflow.keras import broadcast_global_variables, callbacks, elastic

from hvdkit.errors import HvdkitError

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "is_tf_keras",
    "load_model",
    "mend_callbacks",
    "replace_names",
]


def is_tf_keras() -> bool:
    """Whether ``tf.keras`` is Keras 2."""
    return bool(tf.keras.Model.__module__.startswith("tf_keras."))


@functools.wraps(_horovod.DistributedOptimizer)
def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap an optimizer of ``tf_keras`` by Horovod's own path.

    Args:
        optimizer: Of ``tf_keras``.
        args: As for ``horovod.tensorflow.keras.DistributedOptimizer``, as are ``kwargs``.

    Raises:
        TypeError: It is not of ``tf_keras``.
        HvdkitError: It is a ``LossScaleOptimizer``, which goes around the wrapped optimizer.
    """
    if not any(cls.__module__.startswith("tf_keras.") for cls in type(optimizer).__mro__):
        raise TypeError(
            f"expected an optimizer of tf_keras, got {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}; hvdkit.tensorflow.DistributedOptimizer takes those "
            f"of keras and tf.compat.v1 too"
        )
    if hasattr(optimizer, "inner_optimizer"):
        raise HvdkitError(
            "of tf_keras wrap the optimizer that does the update, and put the loss scaling around "
            "it: LossScaleOptimizer(hvd.DistributedOptimizer(optimizer))"
        )
    return _horovod.DistributedOptimizer(optimizer, *args, **kwargs)


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """Like ``DistributedOptimizer``, but the variables of ``local_layers`` stay local to a rank.

    Args:
        optimizer: Of ``tf_keras``.
        args: As for ``DistributedOptimizer``, as are ``kwargs``.
        local_layers: A layer or a list of layers of ``tf_keras``, built already.
    """
    layers = [local_layers] if isinstance(local_layers, tf.Module) else local_layers or []
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped


@functools.wraps(_horovod.load_model)
def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a model of ``tf_keras`` from a file of the format .h5, its optimizer wrapped.

    Args:
        filepath: As for ``horovod.tensorflow.keras.load_model``, as are the others.

    Raises:
        HvdkitError: The optimizer came out plain, or the file has another format.
    """
    if str(filepath).endswith(".keras"):
        raise HvdkitError(
            f"{filepath}: Horovod cannot load the optimizer of tf_keras from this format; save the "
            f"model as .h5, or load it with compile=False and compile it with a wrapped optimizer"
        )
    model = _horovod.load_model(filepath, *args, **kwargs)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not hasattr(optimizer, "register_local_var"):
        raise HvdkitError(
            f"{filepath}: the optimizer came out as a plain {type(optimizer).__name__}, which does "
            f"not average; save the model as .h5, or compile it with a wrapped optimizer"
        )
    return model


class _Backend:
    """``tf.keras.backend``, as Horovod's callbacks expect it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tf.keras.backend, name)

    def set_value(self, variable: Any, value: Any) -> None:
        """Set a variable; Horovod calls it for an optimizer's momentum, often a mere number."""
        if not isinstance(variable, (int, float)):
            tf.keras.backend.set_value(variable, value)
        elif variable != value:
            raise HvdkitError(
                "this optimizer of tf_keras has its momentum as a number, which cannot follow the "
                "learning rate: give the callback momentum_correction=False, or take "
                "tf.keras.optimizers.legacy.SGD"
            )


@functools.cache
def mend_callbacks() -> None:
    """Give Horovod's callbacks and values the backend of ``tf.keras``, for Keras 3's."""
    _horovod.K = callbacks.K = _Backend()


def replace_names() -> dict[str, Any]:
    """Return what ``hvdkit.tensorflow.keras`` has by these names where ``tf.keras`` is Keras 2."""
    return {
        "DistributedOptimizer": DistributedOptimizer,
        "PartialDistributedOptimizer": PartialDistributedOptimizer,
        "broadcast_global_variables": broadcast_global_variables,
        "callbacks": callbacks,
        "elastic": elastic,
        "load_model": load_model,
    }
