"""2,000 steps of tapes and optimizers trace nothing new and leave nothing behind."""

import keras
import numpy as np
import tensorflow as tf

import hvdkit.tensorflow as hvd
from tests.distributed.growth import STEPS, STEPS_PER_EPOCH, WARM_UP_EPOCHS, Growth
from tests.distributed.worker import run_checks

FEATURES, ROWS, LAST_ROWS = 16, 8, 5


def _build_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(16), keras.layers.Dense(3)]
    )


def _train(step):
    """Run all steps; return the process's growth since the warm-up."""
    growth = None
    x = np.random.default_rng(hvd.rank()).standard_normal((ROWS, FEATURES)).astype("float32")
    for number in range(STEPS):
        if number == WARM_UP_EPOCHS * STEPS_PER_EPOCH:
            growth = Growth()
        last = (number + 1) % STEPS_PER_EPOCH == 0
        step(tf.constant(x[: LAST_ROWS if last else ROWS]))
    return growth


def _check_tape(most_traces, **options):
    model, optimizer, traces = _build_model(), keras.optimizers.SGD(0.01), []
    optimizer.build(model.trainable_variables)

    @tf.function(**options)
    def step(x):
        traces.append(x.shape)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    _train(step).demand_none()
    assert len(traces) == most_traces, traces
    assert int(optimizer.iterations) == STEPS
    hvd.check_replicas(model)


def check_a_tape_in_a_function():
    _check_tape(2)  # one for each size of a batch


def check_a_tape_in_a_function_that_reduces_retracing():
    _check_tape(2, reduce_retracing=True)  # of one size, then of any


def check_an_optimizer_in_eager_mode():
    variables = [tf.Variable(tf.ones((FEATURES, 3))), tf.Variable(tf.zeros(3))]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    optimizer.build(variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variables[0] + variables[1]) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)

    _train(step).demand_none()
    assert int(optimizer.iterations) == STEPS


if __name__ == "__main__":
    run_checks(globals())
