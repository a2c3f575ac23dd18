"""Learners of the tasks in Keras 3 on TensorFlow, layer for layer those of ``torch_learner``."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from hvdkit.bench.tasks import CONTEXT, Data

__all__ = ["Learner"]

MOMENTUM = 0.9


class Learner:
    """A fresh model that learns a task with all workers. Collective: every rank must make one."""

    def __init__(self, hvd: Any, task: str, data: Data, learning_rate: float, seed: int) -> None:
        """Begin with weights drawn by ``seed``; ``hvd`` is the adapter, initialized."""
        keras.utils.set_random_seed(seed)
        self._net = _NETS[task]()
        self._inputs, self._labels = data.inputs, data.labels
        self._held_out = tf.constant(data.held_out_inputs), data.held_out_labels
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(learning_rate, momentum=MOMENTUM)
        self._optimizer = hvd.DistributedOptimizer(optimizer)
        self._optimizer.build(self._net.trainable_variables)
        hvd.broadcast_initial_state(self._net, self._optimizer)
        self._step = tf.function(self._take_step)

    def _take_step(self, inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = self._loss(labels, self._net(inputs, training=True))
        variables = self._net.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)

    def learn(self, indices: Any) -> None:
        """Take one step on these samples. Collective."""
        rows = list(indices)
        self._step(tf.constant(self._inputs[rows]), tf.constant(self._labels[rows]))

    def evaluate(self) -> float:
        """Return the accuracy on the held-out samples."""
        inputs, labels = self._held_out
        scores = self._net(inputs, training=False).numpy()
        return float((scores.argmax(1) == labels).mean())


def _make_digits() -> Any:
    hidden = layers.Dense(128, activation="relu")
    return keras.Sequential([keras.Input((64,)), hidden, layers.Dense(10)])


def _make_text() -> Any:
    """Bengio et al., A Neural Probabilistic Language Model (2003), over bytes."""
    parts = [layers.Embedding(256, 32), layers.Flatten(), layers.Dense(256, activation="relu")]
    return keras.Sequential([keras.Input((CONTEXT,), dtype="int32"), *parts, layers.Dense(256)])


_NETS = {"digits": _make_digits, "text": _make_text}
