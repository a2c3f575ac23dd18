"""Buffers of two Keras workers, on either backend."""

import keras
import numpy as np
import pytest
from keras import layers

import hvdkit.keras as hvd
from hvdkit.errors import RankDisagreementError
from tests.distributed.worker import run_checks


def make_model(width=4):
    """A batch norm, a frozen layer of bfloat16, and a dropout with its seed."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(width, trainable=False, dtype="bfloat16"),
            layers.BatchNormalization(dtype="float32"),
            layers.Dropout(0.5),
        ]
    )


def read(variables):
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables]


def check_statistics_become_the_mean_and_nothing_else_changes():
    model = make_model()
    _, norm, dropout = model.layers
    norm.moving_mean.assign(np.full(4, float(hvd.rank())))
    norm.moving_variance.assign(np.full(4, 10.0 + 2 * hvd.rank()))
    others = [*model.layers[0].variables, norm.gamma, norm.beta, *dropout.variables]
    before = read(others)
    hvd.average_buffers(model)
    np.testing.assert_array_equal(read([norm.moving_mean])[0], (hvd.size() - 1) / 2)
    np.testing.assert_array_equal(read([norm.moving_variance])[0], 10 + hvd.size() - 1)
    assert len(dropout.variables) == 1
    for old, new in zip(before, read(others), strict=True):
        np.testing.assert_array_equal(old, new)


def check_a_model_without_buffers_is_left_alone():
    hvd.average_buffers(keras.Sequential([keras.Input((3,)), layers.Dense(2)]))


def check_models_that_differ_are_named_on_every_rank():
    with pytest.raises(RankDisagreementError, match="not trained"):
        hvd.average_buffers(make_model(4 + hvd.rank()))


if __name__ == "__main__":
    run_checks(globals())
