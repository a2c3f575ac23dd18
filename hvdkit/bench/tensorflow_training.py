"""Training steps in TensorFlow: a Keras model, a tape, one ``tf.function``."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdkit.bench.catalog import LEARNING_RATE, Recipe, Training
from hvdkit.bench.crew import TIMEOUT_S
from hvdkit.bench.models import MODELS
from hvdkit.bench.models.keras_models import build
from hvdkit.bench.timing import Feed, time_steps
from hvdkit.bench.worker import Seat

__all__ = ["make_batch", "prepare", "prepare_loop", "set_up"]

ADAPTERS = {"hvdkit": "hvdkit.tensorflow", "horovod": "horovod.tensorflow"}

Gradients = Callable[[Any, Any, list[Any]], list[Any]]


def prepare(recipe: Recipe, seat: Seat) -> Training:
    """See ``hvdkit.bench.catalog.prepare``."""
    set_up(recipe, seat)
    return prepare_loop(recipe, seat)


def set_up(recipe: Recipe, seat: Seat) -> None:
    """Set threads, the GPU of the local rank, and the dtype of the layers."""
    tf.config.threading.set_intra_op_parallelism_threads(recipe.threads)
    # One operation at a time, beside those that wait.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[seat.local_rank], "GPU")
    keras.config.set_dtype_policy(recipe.dtype)
    keras.utils.set_random_seed(0)


def prepare_loop(recipe: Recipe, seat: Seat) -> Training:
    """Make a loop of one's own over a Keras model, as a candidate would have it."""
    # Before the model: a strategy must come first.
    reduce, run, close = _distribute(recipe, seat)
    net = build(recipe.model)
    variables = [variable.value for variable in net.trainable_variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, net(inputs, training=True))
        for variable, gradient in zip(variables, reduce(tape, value, variables), strict=True):
            variable.assign_sub(tf.cast(LEARNING_RATE, gradient.dtype) * gradient)

    if recipe.input is None:
        inputs, labels = make_batch(recipe)

        @tf.function
        def step() -> None:
            train(inputs, labels)

        return Training(run=lambda steps: time_steps(lambda: run(step, ()), steps), close=close)

    from hvdkit.bench.tensorflow_input import read_batches

    feed = Feed(read_batches(recipe, seat))
    train = tf.function(train)
    return Training(
        run=lambda steps: time_steps(lambda: run(train, feed.draw()), steps, feed), close=close
    )


def make_batch(recipe: Recipe) -> tuple[Any, Any]:
    """Return random inputs and labels of the shapes that the model takes."""
    model = MODELS[recipe.model]
    shape = (recipe.batch, *model.shape)
    if model.kind == "tokens":
        tokens = tf.random.uniform((2, *shape), maxval=model.classes, dtype=tf.int32)
        return tokens[0], tokens[1]
    inputs = tf.cast(tf.random.normal(shape), recipe.dtype)
    return inputs, tf.random.uniform((recipe.batch,), maxval=model.classes, dtype=tf.int32)


def _distribute(
    recipe: Recipe, seat: Seat
) -> tuple[Gradients, Callable[[Any, Any], Any], Callable[[], None]]:
    """Return how a candidate takes gradients, how it runs a step, and how it ends."""
    if recipe.candidate == "mwms":
        return _distribute_by_strategy(seat)
    if recipe.candidate not in ADAPTERS:
        return (
            lambda tape, loss, variables: list(tape.gradient(loss, variables)),
            lambda step, batch: step(*batch),
            lambda: None,
        )
    hvd = importlib.import_module(ADAPTERS[recipe.candidate])
    hvd.init()
    options: dict[str, Any] = {"compression": getattr(hvd.Compression, recipe.compression)}
    if recipe.candidate == "hvdkit" and recipe.bucket_size_mb is not None:
        options["bucket_size_mb"] = recipe.bucket_size_mb

    def reduce(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
        return list(hvd.DistributedGradientTape(tape, **options).gradient(loss, variables))

    return reduce, lambda step, batch: step(*batch), hvd.shutdown


def _distribute_by_strategy(
    seat: Seat,
) -> tuple[Gradients, Callable[[Any, Any], Any], Callable[[], None]]:
    """A custom loop in ``MultiWorkerMirroredStrategy``, whose ``fit`` does not take Keras 3."""
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": list(seat.addresses)},
            "task": {"type": "worker", "index": seat.rank},
        }
    )
    _wait_for_suspended_peers(seat.size)
    kinds = tf.distribute.experimental.CommunicationImplementation
    kind = kinds.NCCL if tf.config.list_physical_devices("GPU") else kinds.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def reduce(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        return list(context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients))

    return reduce, lambda step, batch: strategy.run(step, batch), lambda: None


def _wait_for_suspended_peers(size: int) -> None:
    """Let a peer that is not in turn, and so suspended, not count as dead."""
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=TIMEOUT_S * 1000,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=size)],
    )
