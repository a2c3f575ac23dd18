"""Small Keras models, and two ways to train them: on this rank's rows and on everyone's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import hvdkit.keras as hvd

ROWS = 8  # of each rank in each batch
FEATURES, CLASSES = 4, 3


def build_model(seed: int = 0, dtype: Any = None, **options: Any) -> keras.Model:
    """Two dense layers, their weights the same on every rank."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(6, activation="tanh", dtype=dtype),
            keras.layers.Dense(CLASSES, dtype=dtype, **options),
        ]
    )


def make_data(batches: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows of all ranks, batch after batch, in each batch rank after rank."""
    rng = np.random.default_rng(seed)
    rows = batches * ROWS * hvd.size()
    x = rng.standard_normal((rows, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, rows)


def take_part(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return this rank's rows of each batch."""
    return [
        array.reshape(-1, hvd.size(), ROWS, *array.shape[1:])[:, hvd.rank()].reshape(
            -1, *array.shape[1:]
        )
        for array in arrays
    ]


def compile_model(model: keras.Model, optimizer: Any, **options: Any) -> keras.Model:
    """Compile for classification from logits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model


def fit(model: keras.Model, data: Any, whole: bool = False, **options: Any) -> Any:
    """Run ``model.fit`` in the order of the rows: of this rank, or of the whole batches."""
    x, y = data if whole else take_part(*data)
    batch = ROWS * hvd.size() if whole else ROWS
    return model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, **options)


def read_weights(model: Any) -> list[np.ndarray]:
    """Return the trainable variables as float64 arrays."""
    return [
        keras.ops.convert_to_numpy(keras.ops.cast(v, "float32")).astype("float64")
        for v in model.trainable_variables
    ]


def assert_equal_models(model: Any, reference: Any, atol: float = 2e-6, rtol: float = 1e-5) -> None:
    """Compare the weights with the reference's, and bit for bit with the other ranks'."""
    assert_close(model, reference, atol, rtol)
    hvd.check_replicas(model)


def assert_close(model: Any, reference: Any, atol: float = 2e-6, rtol: float = 1e-5) -> None:
    """Compare the weights with the reference's."""
    pairs = zip(read_weights(model), read_weights(reference), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, atol=atol, rtol=rtol)
