"""Keras 3 on TensorFlow: ``fit`` where a candidate can, a loop on the same model elsewhere."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdkit.bench.catalog import Training
from hvdkit.bench.tensorflow_training import CLASSES, LEARNING_RATE, distribute, set_threads
from hvdkit.bench.timing import time_steps

__all__ = ["prepare"]

ADAPTER = "hvdkit.keras"


class _Clock(keras.callbacks.Callback):
    """Notes when each step of ``fit`` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time."""
        self.ends_s.append(time.perf_counter())


def prepare(
    candidate: str, model: str, *, rank: int, size: int, threads: int, folder: Path
) -> Training:
    """See ``hvdkit.bench.catalog.prepare``."""
    set_threads(threads)
    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    reduce, run, close = distribute(candidate, rank, size, folder)
    net, inputs = _MODELS[model]()
    labels = tf.random.uniform((len(inputs),), maxval=CLASSES, dtype=tf.int32)
    sizes = [int(tf.size(variable)) for variable in net.trainable_variables]
    optimizer = keras.optimizers.SGD(LEARNING_RATE)

    if candidate in ("hvdkit", "single"):
        if candidate == "hvdkit":
            adapter = importlib.import_module(ADAPTER)
            optimizer = adapter.DistributedOptimizer(optimizer)
        net.compile(optimizer, loss, jit_compile="auto" if candidate == "hvdkit" else False)
        batches = tf.data.Dataset.from_tensors((inputs, labels)).cache().repeat()

        def fit(steps: int) -> list[float]:
            clock = _Clock()
            # One more than asked for, and one more to have where the first begins.
            net.fit(batches, steps_per_epoch=steps + 1, verbose=0, callbacks=[clock])
            pairs = zip(clock.ends_s, clock.ends_s[1:], strict=False)
            return [end_s - start_s for start_s, end_s in pairs]

        train = fit
    else:
        variables = [variable.value for variable in net.trainable_variables]

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                value = loss(labels, net(inputs, training=True))
            for variable, gradient in zip(variables, reduce(tape, value, variables), strict=True):
                variable.assign_sub(LEARNING_RATE * gradient)

        def loop(steps: int) -> list[float]:
            return time_steps(lambda: run(step), steps)

        train = loop
    return Training(
        run=train, close=close, batch=len(inputs), tensors=len(sizes), parameters=sum(sizes)
    )


def _make_mlp() -> tuple[Any, Any]:
    layers: list[Any] = [keras.Input((1024,))]
    layers += [keras.layers.Dense(1024, activation="relu") for _ in range(8)]
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)]), tf.random.normal((32, 1024))


def _make_many_small() -> tuple[Any, Any]:
    layers: list[Any] = [keras.Input((64,))]
    for _ in range(100):
        layers += [keras.layers.Dense(64), keras.layers.LayerNormalization(), keras.layers.ReLU()]
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)]), tf.random.normal((128, 64))


def _make_cnn() -> tuple[Any, Any]:
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for width, stride in [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]:
        layers += [
            keras.layers.Conv2D(width, 3, strides=stride, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers), tf.random.normal((32, 32, 32, 3))


_MODELS = {"mlp": _make_mlp, "many-small": _make_many_small, "cnn": _make_cnn}
