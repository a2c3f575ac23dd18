"""Raw TensorFlow training steps: variables, a tape, one ``tf.function``.

Source: the models are those of ``torch_training``, layer for layer; the MLP has half the batch.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit.bench.catalog import TIMEOUT_S, Training
from hvdkit.bench.timing import time_steps

__all__ = ["CLASSES", "LEARNING_RATE", "distribute", "prepare", "set_threads"]

CLASSES = 10
LEARNING_RATE = 1e-3
ADAPTERS = {"hvdkit": "hvdkit.tensorflow", "horovod": "horovod.tensorflow"}

Gradients = Callable[[Any, Any, list[Any]], list[Any]]


def prepare(
    candidate: str, model: str, *, rank: int, size: int, threads: int, folder: Path
) -> Training:
    """See ``hvdkit.bench.catalog.prepare``."""
    set_threads(threads)
    tf.random.set_seed(0)
    reduce, run, close = distribute(candidate, rank, size, folder)
    variables: list[Any] = []
    forward, inputs = _MODELS[model](variables)
    labels = tf.random.uniform((len(inputs),), maxval=CLASSES, dtype=tf.int32)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            logits = forward(inputs)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        for variable, gradient in zip(variables, reduce(tape, loss, variables), strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)

    return Training(
        run=lambda steps: time_steps(lambda: run(step), steps),
        close=close,
        batch=len(inputs),
        tensors=len(variables),
        parameters=sum(int(tf.size(variable)) for variable in variables),
    )


def set_threads(threads: int) -> None:
    """Compute with this many threads, one operation at a time beside those that wait."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def distribute(
    candidate: str, rank: int, size: int, folder: Path
) -> tuple[Gradients, Callable[[Any], Any], Callable[[], None]]:
    """Return how a candidate takes gradients, how it runs a step, and how it ends."""
    if candidate == "mwms":
        return _distribute_by_strategy(rank, size, folder)
    if candidate not in ADAPTERS:
        return (
            lambda tape, loss, variables: list(tape.gradient(loss, variables)),
            lambda step: step(),
            lambda: None,
        )
    hvd = importlib.import_module(ADAPTERS[candidate])
    hvd.init()

    def reduce(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
        return list(hvd.DistributedGradientTape(tape).gradient(loss, variables))

    return reduce, lambda step: step(), hvd.shutdown


def _distribute_by_strategy(
    rank: int, size: int, folder: Path
) -> tuple[Gradients, Callable[[Any], Any], Callable[[], None]]:
    """A custom loop in ``MultiWorkerMirroredStrategy``, whose ``fit`` does not take Keras 3."""
    workers = _exchange_addresses(rank, size, folder)
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    )
    _wait_for_suspended_peers(size)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def reduce(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        return list(context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients))

    return reduce, lambda step: strategy.run(step), lambda: None


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


def _exchange_addresses(rank: int, size: int, folder: Path) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    mine = folder / f"address{rank}"
    mine.with_suffix(".new").write_text(address, encoding="ascii")
    mine.with_suffix(".new").rename(mine)
    paths = [folder / f"address{one}" for one in range(size)]
    while not all(path.exists() for path in paths):
        time.sleep(0.05)
    return [path.read_text(encoding="ascii") for path in paths]


def _make_variable(variables: list[Any], *shape: int, fan_in: int = 0, value: float = 0.0) -> Any:
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    initial = tf.random.uniform(shape, -bound, bound) if fan_in else tf.fill(shape, value)
    variables.append(tf.Variable(initial))
    return variables[-1]


def _make_dense(variables: list[Any], inputs: int, outputs: int) -> Callable[[Any], Any]:
    kernel = _make_variable(variables, inputs, outputs, fan_in=inputs)
    bias = _make_variable(variables, outputs)
    return lambda x: tf.nn.bias_add(tf.matmul(x, kernel), bias)


def _make_normalization(variables: list[Any], width: int, axes: list[int]) -> Callable[[Any], Any]:
    scale = _make_variable(variables, width, value=1.0)
    offset = _make_variable(variables, width)

    def normalize(x: Any) -> Any:
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-5)

    return normalize


def _convolve(x: Any, kernel: Any, bias: Any, stride: int) -> Any:
    return tf.nn.bias_add(tf.nn.conv2d(x, kernel, stride, "SAME"), bias)


def _chain(layers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def forward(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return forward


def _make_mlp(variables: list[Any]) -> tuple[Callable[[Any], Any], Any]:
    layers: list[Callable[[Any], Any]] = []
    for _ in range(8):
        layers += [_make_dense(variables, 1024, 1024), tf.nn.relu]
    layers.append(_make_dense(variables, 1024, CLASSES))
    return _chain(layers), tf.random.normal((32, 1024))


def _make_many_small(variables: list[Any]) -> tuple[Callable[[Any], Any], Any]:
    layers: list[Callable[[Any], Any]] = []
    for _ in range(100):
        layers += [_make_dense(variables, 64, 64), _make_normalization(variables, 64, [-1])]
        layers.append(tf.nn.relu)
    layers.append(_make_dense(variables, 64, CLASSES))
    return _chain(layers), tf.random.normal((128, 64))


def _make_cnn(variables: list[Any]) -> tuple[Callable[[Any], Any], Any]:
    layers: list[Callable[[Any], Any]] = []
    channels = 3
    for width, stride in [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]:
        kernel = _make_variable(variables, 3, 3, channels, width, fan_in=9 * channels)
        bias = _make_variable(variables, width)
        layers.append(functools.partial(_convolve, kernel=kernel, bias=bias, stride=stride))
        layers += [_make_normalization(variables, width, [0, 1, 2]), tf.nn.relu]
        channels = width
    layers += [lambda x: tf.reduce_mean(x, [1, 2]), _make_dense(variables, channels, CLASSES)]
    return _chain(layers), tf.random.normal((32, 32, 32, 3))


_MODELS = {"mlp": _make_mlp, "many-small": _make_many_small, "cnn": _make_cnn}
