"""Faults of stock Horovod on today's TensorFlow and Keras: each input fails as it is documented.

hvdkit's own checks run the same inputs and demand the right result; every check here names its
counterpart. One that fails says that stock Horovod no longer has that fault.
"""

import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.distributed.worker import run_checks

ROWS, BATCH = 32, 16


def _build_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def _fit(model, optimizer, **options):
    """One epoch on rows that differ from rank to rank."""
    rng = np.random.default_rng(hvd.rank())
    x, y = rng.standard_normal((ROWS, 4)).astype("float32"), rng.integers(0, 3, ROWS)
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options
    )
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def _difference_between_ranks(model):
    weights = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    first, second = hvd.allgather(weights[None]).numpy()
    return np.abs(first - second).max()


def check_c1_fit_trains_without_an_error_and_never_averages():
    """Right in worker_keras: check_c1_other_rows_on_each_rank."""
    for wrap in (hvd_keras.DistributedOptimizer, hvd.DistributedOptimizer):
        for options in ({}, {"run_eagerly": True}):
            model = _build_model()
            assert _difference_between_ranks(model) == 0
            _fit(model, wrap(keras.optimizers.SGD(0.1)), **options)
            assert _difference_between_ranks(model) > 1e-3


def check_apply_gradients_never_averages():
    """Right in worker_keras: check_loops_inside_and_outside_of_a_function."""
    variable = keras.Variable([1.0])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply_gradients([(tf.constant([float(hvd.rank())]), variable)])
    np.testing.assert_array_equal(variable.numpy(), [1.0 - hvd.rank()])


def check_c10_a_model_with_a_wrapped_optimizer_is_neither_saved_nor_loaded():
    """Right in worker_keras_saving: check_c10_a_saved_model_loads_without_hvdkit_and_is_..."""
    model = _build_model()
    _fit(model, hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        with pytest.raises(TypeError, match="'list' object is not callable"):
            model.save(path)
        _fit(model, keras.optimizers.Adam(0.01))
        model.save(path)
        assert type(hvd_keras.load_model(path).optimizer) is keras.optimizers.Adam


def check_c13_a_loss_scale_optimizer_cannot_be_wrapped():
    """Right in worker_keras: check_c13_loss_scaling_with_an_inf_on_one_rank."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        hvd_keras.DistributedOptimizer(optimizer)


def check_c15_a_tape_does_not_know_keras_variables():
    """Right in worker_tensorflow: check_c15_keras_variables_single_sources_and_nests."""
    model = _build_model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((2, 4))))
    tape = hvd.DistributedGradientTape(tape)
    with pytest.raises(AttributeError, match="'Variable' object has no attribute 'ref'"):
        tape.gradient(loss, model.trainable_variables)


def check_op_is_dropped_on_the_way_to_a_keras_optimizer():
    """Right in worker_tensorflow_training: check_options_of_horovod_by_position_and_name.

    Keras 3 never calls the reduction, so it is called here, with a variable that it knows.
    """
    everyones = [r + 1.0 for r in range(hvd.size())]
    total = sum(everyones)
    for wrap, expected in (
        (hvd.DistributedOptimizer, total / hvd.size()),
        (hvd_keras.DistributedOptimizer, total),
    ):
        optimizer = wrap(keras.optimizers.SGD(0.1), op=hvd.Sum)
        gradient = tf.constant([everyones[hvd.rank()]])
        [reduced] = optimizer._allreduce([gradient], [tf.Variable([1.0])])
        np.testing.assert_allclose(reduced, [expected])


def check_xla_has_no_all_reduce():
    """Right in worker_keras_saving: check_a_demand_for_xla_is_refused, and in every ``fit``."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [hvd.allreduce(g, name=f"g{i}") for i, g in enumerate(gradients)]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model = Model([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="unsupported operations"):
        _fit(model, keras.optimizers.SGD(0.1), jit_compile=True)


if __name__ == "__main__":
    run_checks(globals())
