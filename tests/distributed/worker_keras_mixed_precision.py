"""Keras's mixed precision, on both backends: distributed equals single within half precision."""

import keras
import numpy as np
from keras import ops

import hvdkit.keras as hvd
from tests.distributed.keras_training import (
    CLASSES,
    FEATURES,
    ROWS,
    assert_equal_models,
    compile_model,
    fit,
    make_data,
    read_weights,
)
from tests.distributed.worker import run_checks


def _build_model():
    """Of the policy that is set: weights of float32, layers that compute in 16 bits."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    return model


class _Policy:
    """Sets ``keras.mixed_precision``'s global policy for a while."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(self.name)

    def __exit__(self, *error):
        keras.mixed_precision.set_dtype_policy(self.before)


def _list_runs():
    """Yield optimizers, and whether to run them eagerly."""
    yield lambda: keras.optimizers.SGD(0.2, momentum=0.9), False
    yield lambda: keras.optimizers.SGD(0.2, momentum=0.9), True
    yield lambda: keras.optimizers.Adam(0.05, epsilon=1e-3), False


def check_training_equals_one_process():
    data = make_data(6)
    for policy, atol in (("mixed_float16", 2e-3), ("mixed_bfloat16", 1e-2)):
        for make, eagerly in _list_runs():
            with _Policy(policy):
                model = compile_model(
                    _build_model(), hvd.DistributedOptimizer(make()), run_eagerly=eagerly
                )
                reference = compile_model(_build_model(), make(), run_eagerly=eagerly)
            scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert scaled == (policy == "mixed_float16"), "Keras itself scales the loss"
            assert not model.jit_compile
            start = read_weights(model)
            fit(model, data)
            fit(reference, data, whole=True)
            assert_equal_models(model, reference, atol=atol, rtol=0)
            assert int(ops.convert_to_numpy(_inner(model).iterations)) == 6
            pairs = zip(read_weights(model), start, strict=True)
            moved = max(np.abs(now - then).max() for now, then in pairs)
            assert moved > 10 * atol, "too little to compare"


def _inner(model):
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def check_an_overflow_on_one_rank_skips_on_all():
    x, y = make_data(3)
    bad = x.copy()
    bad[ROWS * hvd.size()] = 1e6  # of the second batch, on rank 0; inf in float16
    rows = np.r_[0 : ROWS * 2, ROWS * 4 : ROWS * 6]
    for make, eagerly in _list_runs():
        with _Policy("mixed_float16"):
            model = compile_model(
                _build_model(), hvd.DistributedOptimizer(make()), run_eagerly=eagerly
            )
            reference = compile_model(_build_model(), make(), run_eagerly=eagerly)
        fit(model, (bad, y))
        assert int(ops.convert_to_numpy(_inner(model).iterations)) == 2
        assert float(ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 2.0**14
        everyones = hvd.allgather(np.array([float(model.optimizer.dynamic_scale)]))
        assert len(set(everyones)) == 1
        fit(reference, (x[rows], y[rows]), whole=True)
        assert_equal_models(model, reference, atol=2e-3, rtol=0)


def check_accumulation():
    data = make_data(6)
    for policy, atol in (("mixed_float16", 2e-3), ("mixed_bfloat16", 1e-2)):
        with _Policy(policy):
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.1),
                backward_passes_per_step=3,
                average_aggregated_gradients=True,
            )
            model = compile_model(_build_model(), optimizer)
            plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
            reference = compile_model(_build_model(), plain)
        fit(model, data)
        fit(reference, data, whole=True)
        assert_equal_models(model, reference, atol=atol, rtol=0)


def check_weights_of_16_bits():
    """The gradients themselves travel in 16 bits."""
    data = make_data(4)
    for dtype, atol in (("float16", 1e-2), ("bfloat16", 5e-2)):
        with _Policy(dtype):
            keras.utils.set_random_seed(0)
            layers = [keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)]
            models = [keras.Sequential(layers), keras.models.clone_model(keras.Sequential(layers))]
        model, reference = models
        reference.set_weights(model.get_weights())
        compile_model(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        compile_model(reference, keras.optimizers.SGD(0.1))
        fit(model, data)
        fit(reference, data, whole=True)
        assert_equal_models(model, reference, atol=atol, rtol=0)


if __name__ == "__main__":
    run_checks(globals())
