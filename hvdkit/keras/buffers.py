"""Bring the buffers of a model together, batch-norm statistics above all."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import hvd, sum_array
from hvdkit.keras.state import name_variables

__all__ = ["average_buffers"]


def average_buffers(model: Any, process_set: Any = hvd.global_process_set) -> None:
    """Average the floating-point weights that are not trained, before evaluation or saving.

    In training every rank's batch norm keeps moving means and variances of its own share.
    Metrics, seeds and integer weights are left alone.

    The sum is taken in float64, so a weight that was equal on all ranks keeps its bits. One
    all-reduce for all.

    Collective: every rank of ``process_set`` must call, outside of ``tf.function``.

    Args:
        model: Of the same weights on every rank.
        process_set: The ranks to average over.

    Raises:
        RankDisagreementError: On every rank, if weights differ in name, shape or dtype.
    """
    buffers = [
        weight
        for weight in model.non_trainable_weights
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(weight.dtype))
    ]
    demand_equal_entries(
        "average_buffers: the weights that are not trained",
        [(name, f"{weight.dtype}{list(weight.shape)}") for name, weight in name_variables(buffers)],
        name="average_buffers",
        process_set=process_set,
    )
    if not buffers:
        return
    arrays = [keras.ops.convert_to_numpy(weight).astype(np.float64) for weight in buffers]
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    mean = sum_array(flat, name="average_buffers", process_set=process_set) / process_set.size()
    start = 0
    for weight, array in zip(buffers, arrays, strict=True):
        end = start + array.size
        weight.assign(mean[start:end].reshape(array.shape))
        start = end
