"""Training on two ranks equals training on one: with tapes and with optimizers of every kind."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.errors import HvdkitError
from tests.distributed.worker import run_checks

STEPS, ROWS = 4, 6


def build_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(17, activation="tanh"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3),
        ]
    )


def make_batches(count=STEPS):
    """Whole batches, the same on every rank."""
    generator = np.random.default_rng(1)
    for _ in range(count):
        x = generator.standard_normal((ROWS * hvd.size(), 5), np.float32)
        yield x, np.tanh(x[:, :3]) + 0.1


def take_part(array):
    return array[hvd.rank() * ROWS : (hvd.rank() + 1) * ROWS]


def compute_loss(model, x, y):
    return tf.reduce_mean((model(x) - y) ** 2)


def assert_equal_models(model, reference, atol=2e-6):
    for ours, theirs in zip(model.variables, reference.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=atol, err_msg=ours.path)
    hvd.check_replicas(model, buffers=True)


def train(model, optimizer, wrap, *, distributed, passes=1):
    """Update with gradients of a tape, which is distributed or not."""

    @wrap
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = compute_loss(model, x, y)
        if distributed == "tape":
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for x, y in make_batches(STEPS * passes):
        if distributed:
            x, y = take_part(x), take_part(y)
        step(tf.constant(x), tf.constant(y))


def check_a_tape_and_every_kind_of_optimizer():
    kinds = [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
        lambda: keras.optimizers.Lion(0.01),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ]
    for make, wrap in itertools.product(kinds, (lambda function: function, tf.function)):
        model, reference = build_model(), build_model()
        train(model, make(), wrap, distributed="tape")
        train(reference, make(), wrap, distributed=None)
        assert_equal_models(model, reference, atol=1e-4)


def check_a_keras_optimizer_with_accumulation():
    for passes, average in ((1, False), (3, True), (3, False)):
        model, reference = build_model(), build_model()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9),
            backward_passes_per_step=passes,
            average_aggregated_gradients=average,
        )
        plain = keras.optimizers.SGD(
            0.05 * (1 if average else passes),
            momentum=0.9,
            gradient_accumulation_steps=passes if passes > 1 else None,
        )
        train(model, optimizer, tf.function, distributed="optimizer", passes=passes)
        train(reference, plain, tf.function, distributed=None, passes=passes)
        assert_equal_models(model, reference, atol=1e-5)


def check_options_of_horovod_by_position_and_name():
    """As in Horovod: optimizer, name, use_locking, device_dense, device_sparse, compression."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), "Mine", False, "", "", hvd.Compression.none, op=hvd.Sum
    )
    v = keras.Variable([1.0])
    optimizer.apply([tf.constant([1.0 + hvd.rank()])], [v])
    np.testing.assert_allclose(v, [1.0 - 0.1 * sum(r + 1 for r in range(hvd.size()))])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=[[v]])
    optimizer.apply([tf.constant([1.0 + hvd.rank()])], [v])
    np.testing.assert_allclose(v, [1.0 - 0.1 * 3 - 1.5], rtol=1e-6)


def _train_v1(make_optimizer, passes=1, op=None):
    """One variable with gradient rank + 1, in a graph of its own."""
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable(
            "v", initializer=tf.constant([1.0, 2.0]) * (hvd.rank() + 1.0), use_resource=True
        )
        loss = tf.reduce_sum(v) * (hvd.rank() + 1.0)
        options = {} if op is None else {"op": op}
        optimizer = hvd.DistributedOptimizer(
            make_optimizer(), backward_passes_per_step=passes, **options
        )
        update = optimizer.minimize(loss)
        broadcast = hvd.broadcast_global_variables(0)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(tf.compat.v1.local_variables_initializer())  # Horovod's own counters
            session.run(broadcast)
            start = session.run(v)
            for _ in range(2 * passes):
                session.run(update)
            return start, session.run(v)


def check_optimizers_of_compat_v1_in_a_graph():
    mean = sum(r + 1 for r in range(hvd.size())) / hvd.size()

    def make():
        return tf.compat.v1.train.GradientDescentOptimizer(0.1)

    for op, factor in ((None, mean), (hvd.Sum, mean * hvd.size())):
        start, end = _train_v1(make, op=op)
        np.testing.assert_allclose(start, [1.0, 2.0])  # the root's
        np.testing.assert_allclose(end, start - 2 * 0.1 * factor, rtol=1e-6)
    start, end = _train_v1(make, passes=2)
    np.testing.assert_allclose(end, start - 2 * 2 * 0.1 * mean, rtol=1e-6)


def check_optimizers_of_compat_v1_in_eager_mode():
    v = tf.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.0))
    optimizer.minimize(lambda: tf.reduce_sum(v) * (hvd.rank() + 1.0), var_list=[v])
    np.testing.assert_allclose(v, np.array([1.0, 2.0]) - 0.1 * 1.5, rtol=1e-6)
    with pytest.raises(ValueError, match="need a Keras 3 optimizer; GradientDescentOptimizer"):
        hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1), clip_grad_norm=1.0
        )


def check_a_tape_in_a_graph_of_compat_v1():
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable("w", initializer=tf.ones(3), use_resource=True)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * float(hvd.rank()))
        [gradient] = hvd.DistributedGradientTape(tape).gradient(loss, [v])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            np.testing.assert_allclose(session.run(gradient), [0.5] * 3)


def check_a_loss_that_is_not_finite_on_one_rank_updates_none():
    culprit = hvd.size() - 1
    for wrap in (lambda function: function, tf.function):
        model, optimizer = build_model(), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        monitor = hvd.HealthMonitor(model, optimizer, max_skips=1, window=None)

        @wrap
        def step(x, y, model=model, optimizer=optimizer, monitor=monitor):
            with tf.GradientTape() as tape:
                loss = monitor.watch(tf.reduce_mean((model(x, training=True) - y) ** 2))
            tape = hvd.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def take(bad, step=step, monitor=monitor):
            x, y = tf.ones((2, 5)) + hvd.rank(), tf.ones((2, 3))
            monitor.end_step(step(x * (np.inf if bad and hvd.rank() == culprit else 1), y))

        def read(model=model, optimizer=optimizer):
            return [v.numpy() for v in [*model.trainable_variables, *optimizer.variables]]

        before = read()
        take(bad=False)
        middle = read()
        take(bad=True)
        after = read()
        take(bad=False)
        take(bad=True)
        with pytest.raises(HvdkitError, match=rf"step 4: the loss of rank {culprit} is not finite"):
            take(bad=True)
        assert not all(map(np.array_equal, before, middle))
        assert all(map(np.array_equal, middle, after))
        assert all(np.isfinite(value).all() for value in read())
        hvd.check_replicas(model)


if __name__ == "__main__":
    run_checks(globals())
