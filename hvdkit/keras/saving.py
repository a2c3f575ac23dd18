"""Load a saved model and go on training it on many ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import keras
from keras.src.legacy.saving import legacy_h5_format

from hvdkit.keras.backend import hvd
from hvdkit.keras.collectives import share_errors
from hvdkit.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a Keras model and make its optimizer distributed, with the state that it was saved with.

    A model is saved with its plain optimizer, so that ``keras.models.load_model`` loads it where
    hvdkit is not installed.

    Collective: every rank must call, each with a path that it can read.

    Args:
        filepath: A ``.keras`` or ``.h5`` file.
        custom_optimizers: Optimizer classes that are not Keras's own.
        custom_objects: Names of other classes and functions; see ``keras.models.load_model``.
        compression: As for ``DistributedOptimizer``.
        legacy_opts: Keras 3 has no legacy optimizers: must be False.
        options: Further arguments of ``DistributedOptimizer``, which are not saved.

    Returns:
        The model, compiled as it was; without an optimizer if it was saved without.

    Raises:
        RankDisagreementError: Another rank could not load the model, or loaded another optimizer.
    """
    if legacy_opts:
        raise ValueError(
            "Keras 3 has no legacy optimizers; with TF_USE_LEGACY_KERAS=1, use "
            "horovod.tensorflow.keras.load_model"
        )

    def load() -> Any:
        model = keras.models.load_model(filepath, custom_objects=objects)
        _restore_optimizer(model, filepath)
        return model

    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    process_set = options.get("process_set", hvd.global_process_set)
    if process_set.included():
        with share_errors("load_model", process_set):
            model = load()
    else:
        model = load()
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model


def _restore_optimizer(model: Any, filepath: Any) -> None:
    """Mend what Keras makes of the optimizer in an HDF5 file.

    It builds the optimizer for the model's own variables without those of its layers; the
    slots are lost and the first step fails.
    """
    optimizer = getattr(model, "optimizer", None)
    known = len(getattr(optimizer, "_trainable_variables", model.trainable_variables))
    if optimizer is None or not optimizer.built or known == len(model.trainable_variables):
        return
    if not str(filepath).endswith((".h5", ".hdf5")):
        return
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(model.trainable_variables)
    with h5py.File(filepath, "r") as file:
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        for variable, value in zip(fresh.variables, values, strict=True):
            variable.assign(value[()])
    model.optimizer = fresh
