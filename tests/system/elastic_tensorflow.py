"""Trains a small net with Keras in an elastic job, and counts every sample; see elastic_torch.py.

``ELASTIC_LOOP``: ``fit``, or ``tape`` for a loop of its own with a gradient tape. ``fit`` runs on
either backend of Keras.
"""

from __future__ import annotations

import hashlib
import os
import time

import keras
import numpy as np

from tests.system.elastic_worker import HOST, Doom, Watch, report

LOOP = os.environ.get("ELASTIC_LOOP", "fit")
if LOOP == "tape":
    import tensorflow as tf

    import hvdkit.tensorflow as hvd
else:
    import hvdkit.keras as hvd

SAMPLES = 96
BATCH = 4
MOST_EPOCHS = 400
SIZES = [int(size) for size in os.environ["ELASTIC_SIZES"].split(",")]
WIDTH = int(os.environ.get("ELASTIC_WIDTH", "16"))

doom = Doom()


class Marker(keras.layers.Layer):
    """Hands its input on, and is a moment of the forward and of the backward pass."""

    def call(self, inputs):
        """Mark a moment that compiled functions have too, on TensorFlow."""
        if keras.backend.backend() != "tensorflow":
            doom.strikes("forward", Watch.step)
            return inputs
        import tensorflow as tf

        @tf.custom_gradient
        def mark(x):
            def strike(moment):
                def act():
                    doom.strikes(moment, Watch.step)
                    return np.float32(1)

                return tf.ensure_shape(tf.py_function(act, [], tf.float32), [])

            return x * strike("forward"), lambda gradient: gradient * strike("backward")

        return mark(inputs)


def make_model() -> keras.Model:
    """A net with a moment in its middle; a wide one makes for long reductions."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((SAMPLES,)),
            layers.Dense(WIDTH, activation="relu"),
            Marker(),
            layers.Dense(WIDTH, activation="relu"),
            layers.Dense(1),
        ]
    )


def note_step(state, numbers) -> None:
    """Note what all workers trained on in one step."""
    doom.strikes("gather", state.step)
    numbers = np.asarray(hvd.allgather(np.asarray(numbers, "int64"), name="numbers"))
    Watch.note(state, numbers.tolist(), hvd.size())
    Watch.step = state.step
    doom.strikes("commit", state.step)


class NoteCallback(keras.callbacks.Callback):
    """Notes the samples of each batch, which ``fit`` takes in their order."""

    def __init__(self, state, numbers) -> None:
        super().__init__()
        self.state, self.numbers = state, numbers

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Note the batch."""
        note_step(self.state, self.numbers[batch * BATCH : (batch + 1) * BATCH])


def fit_epoch(model, state) -> None:
    """Train on what is left of the epoch."""
    numbers = state.shard.rest()
    model.fit(
        np.eye(SAMPLES, dtype="float32")[numbers],
        np.zeros(len(numbers), "float32"),
        BATCH,
        verbose=0,
        shuffle=False,
        callbacks=[
            NoteCallback(state, numbers),
            hvd.elastic.UpdateShardCallback(state.shard, BATCH),
            hvd.elastic.CommitStateCallback(state),
        ],
    )


def loop_epoch(model, state) -> None:
    """Train on what is left of the epoch."""
    for numbers in state.shard.rest().batch(BATCH):
        take_step(model, model.optimizer, numbers)
        note_step(state, numbers.numpy())
        state.shard.advance(len(numbers))
        state.commit()


if LOOP == "tape":

    @tf.function(reduce_retracing=True)
    def take_step(model, optimizer, numbers) -> None:
        """Update the weights with the gradient that is averaged over all workers."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.one_hot(numbers, SAMPLES)) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)


def main() -> None:
    hvd.init()
    keras.utils.set_random_seed(sum(HOST.encode()))  # every worker another start
    model = make_model()
    optimizer = keras.optimizers.SGD(hvd.scale_learning_rate(0.01), momentum=0.9)
    model.compile(optimizer if LOOP == "tape" else hvd.DistributedOptimizer(optimizer), "mse")
    shard = hvd.elastic.ElasticShard(np.arange(SAMPLES), seed=3)
    State = hvd.elastic.TensorFlowKerasState if LOOP == "tape" else hvd.elastic.KerasState
    state = State(model, shard=shard, learning_rate_rule="linear", **Watch.initial())

    @hvd.elastic.run
    def train(state) -> None:
        Watch.step = state.step
        hvd.check_replicas(model)
        report(f"size-{hvd.size()}-{len(state.sizes)}", step=state.step)
        while state.shard.epoch < MOST_EPOCHS:
            if len(state.seen) >= SAMPLES:
                Watch.end_epoch(state, SAMPLES)
            if state.sizes[-len(SIZES) :] == SIZES and not state.seen:
                break
            (loop_epoch if LOOP == "tape" else fit_epoch)(model, state)
            time.sleep(0.01)
        hvd.check_replicas(model)

    train(state)
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    report(
        f"done-{HOST}",
        digest=hashlib.sha256(weights).hexdigest(),
        sizes=state.sizes,
        epochs=state.epochs,
        size=hvd.size(),
        rates=[float(keras.ops.convert_to_numpy(optimizer.learning_rate))],
    )


if __name__ == "__main__":
    main()
