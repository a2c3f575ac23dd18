"""What a replica holds in Keras on TensorFlow, counted from variables and the graph of a step.

TensorFlow counts what it allocates on GPUs only: on a CPU the peak of a step is taken for the
activations that its graph keeps for the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdkit.bench.memory import Settings
from hvdkit.bench.memory_worker import load
from hvdkit.bench.models import MODELS
from hvdkit.bench.models.keras_models import build
from hvdkit.tuning import FUSION_THRESHOLD_BYTES

__all__ = ["count"]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adamw": lambda: keras.optimizers.AdamW(1e-3),
}
# What these return is their input's memory.
ALIASES = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
# Not made by the forward pass.
SOURCES = {"Const", "ReadVariableOp", "VarHandleOp", "Placeholder"}


def count(settings: Settings) -> dict[str, Any]:
    """Return what ``hvdkit.bench.memory.make_replica`` takes."""
    own = ":" in settings.model
    model = load(settings.model)() if own else build(settings.model)
    make = load(settings.optimizer) if ":" in settings.optimizer else OPTIMIZERS[settings.optimizer]
    optimizer = make()
    optimizer.build(model.trainable_variables)
    take_loss = None if settings.loss is None else load(settings.loss)
    batch = settings.batch
    assert batch is not None

    def forward(samples: int) -> Any:
        if take_loss is None:
            return _take_loss(model, samples, settings.model)
        return take_loss(model, samples)

    gpus = tf.config.list_physical_devices("GPU")
    few = max(1, batch // 2)
    samples = (few, batch) if few < batch else (batch, 2 * batch)
    if gpus:
        peaks = [[one, _measure_peak(model, optimizer, forward, one)] for one in samples]
    else:
        peaks = [[one, _count_saved(model, forward, one)] for one in samples]
    gradients = [_count_bytes(one) for one in model.trainable_variables]
    shared = sum(size for size in gradients if 2 * size < settings.bucket_bytes)
    parameters = sum(gradients)
    return {
        "parameters": parameters,
        "buffers": sum(map(_count_bytes, model.non_trainable_variables)),
        "gradients": parameters,
        # Gradients that share a buffer are copied into it.
        "reduction": FUSION_THRESHOLD_BYTES + shared,
        "optimizer": sum(_count_bytes(one) for one in optimizer.variables if one.shape),
        "activations": _count_saved(model, forward, batch),
        "batch": batch,
        "peaks": peaks,
        "device": "GPU" if gpus else "CPU",
        "available": None if gpus else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "peak_measured": bool(gpus),
    }


def _take_loss(model: Any, samples: int, name: str) -> Any:
    known = MODELS[name]
    if known.kind == "tokens":
        shape = (samples, *known.shape)
        inputs = tf.random.uniform(shape, 0, known.classes, tf.int32)
        labels = tf.random.uniform(shape, 0, known.classes, tf.int32)
    else:
        inputs = tf.random.normal((samples, *model.input_shape[1:]))
        labels = tf.random.uniform((samples,), 0, known.classes, tf.int32)
    scores = model(inputs, training=True)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
    return tf.reduce_mean(losses)


def _count_saved(model: Any, forward: Callable[[int], Any], samples: int) -> int:
    """Return the bytes of what the forward part of a step's graph hands to the backward part."""
    saved: dict[str, int] = {}

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = forward(samples)
        graph = tf.compat.v1.get_default_graph()
        before = {operation.name for operation in graph.get_operations()}
        gradients = tape.gradient(loss, [one.value for one in model.trainable_variables])
        for operation in graph.get_operations():
            if operation.name in before:
                continue
            for tensor in operation.inputs:
                origin = _find_origin(tensor)
                if origin.op.name in before and origin.op.type not in SOURCES:
                    count = origin.shape.num_elements()
                    saved[origin.name] = (count or 0) * origin.dtype.size
        return [one for one in gradients if one is not None]

    step.get_concrete_function()
    return sum(saved.values())


def _find_origin(tensor: Any) -> Any:
    while tensor.op.type in ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def _measure_peak(model: Any, optimizer: Any, forward: Callable[[int], Any], samples: int) -> int:
    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = forward(samples)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [one.value for one in variables])
        optimizer.apply(gradients, variables)

    step()
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    tf.config.experimental.reset_memory_stats("GPU:0")
    step()
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] - before
    # TensorFlow makes gradients anew in each step: they are in the peak.
    return int(max(0, peak - sum(map(_count_bytes, model.trainable_variables))))


def _count_bytes(variable: Any) -> int:
    size: int = tf.as_dtype(variable.dtype).size
    for length in variable.shape:
        size *= length
    return size
