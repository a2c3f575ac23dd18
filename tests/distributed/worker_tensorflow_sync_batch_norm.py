"""SyncBatchNormalization on two ranks equals BatchNormalization on their batches together."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tensorflow as hvd
from tests.distributed.worker import run_checks

WRAPS = (lambda function: function, tf.function)


def _everyones(shape, seed=0):
    """One batch for each rank: of other sizes, scales and means."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal((3 + 2 * r, *shape)) * (1 + 3 * r) + 10 * r).astype("float32")
        for r in range(hvd.size())
    ]


def _run(layer, x, wrap, mask=None):
    """Return output, gradients of input and weights, and moving statistics."""
    layer.build(x.shape)
    x = tf.constant(x)

    @wrap
    def compute(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
            # Another weight for each element, or the gradient would be zero.
            loss = tf.reduce_sum(y * tf.sin(x * 3.0))
        return y, tape.gradient(loss, [x, *[v.value for v in layer.trainable_variables]])

    y, gradients = compute(x, mask)
    return [y, *gradients, *[v.value for v in layer.non_trainable_variables]]


def _compare(shape, wrap, masks=None, **options):
    parts = _everyones(shape)
    ours = _run(
        hvd.SyncBatchNormalization(**options),
        parts[hvd.rank()],
        wrap,
        None if masks is None else masks[hvd.rank()],
    )
    theirs = _run(
        keras.layers.BatchNormalization(**options),
        np.concatenate(parts),
        wrap,
        None if masks is None else np.concatenate(masks),
    )
    first = sum(len(part) for part in parts[: hvd.rank()])
    rows = slice(first, first + len(parts[hvd.rank()]))
    for index, (mine, whole) in enumerate(zip(ours, theirs, strict=True)):
        if index < 2:
            whole = whole[rows]
        elif index < len(ours) - 2:  # of gamma and beta: each rank has its own rows' share
            mine = hvd.allreduce(mine, op=hvd.Sum)
        np.testing.assert_allclose(mine, whole, rtol=2e-4, atol=2e-4)


def check_output_gradients_and_statistics():
    for wrap in WRAPS:
        _compare((4,), wrap)
        _compare((5, 6, 3), wrap, momentum=0.5, epsilon=1e-2)
        _compare((3, 5), wrap, axis=1)
        _compare((4,), wrap, center=False, scale=False)


def check_masks():
    rng = np.random.default_rng(3)
    masks = [rng.random((len(x), 5)) < 0.6 for x in _everyones((5, 3))]
    for wrap in WRAPS:
        _compare((5, 3), wrap, masks)


def check_inference_is_local():
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 3))
    if hvd.rank() == 0:  # the other rank takes no part
        np.testing.assert_allclose(layer(tf.ones((2, 3))), np.ones((2, 3)), rtol=1e-3)


def _build_model(normalize, dtype=None):
    keras.utils.set_random_seed(0)
    norm = normalize(dtype=dtype)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, dtype=dtype),
            norm,
            keras.layers.Dense(8, dtype=dtype),
            norm,  # a layer that is used twice
            keras.layers.Dense(2, dtype=dtype),
        ]
    )


def _fit(model, optimizer, x, y, batch, **options):
    model.compile(optimizer, "mse", **options)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)


def check_fit_equals_one_process():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((hvd.size(), 24, 4)).astype("float32") + 1
    x[1] *= 3
    y = np.tanh(x[..., :2])
    whole = [
        a.reshape(hvd.size(), 4, 6, -1).swapaxes(0, 1).reshape(-1, a.shape[-1]) for a in (x, y)
    ]
    for options in ({}, {"run_eagerly": True}, {"steps_per_execution": 2}):
        model = _build_model(hvd.SyncBatchNormalization)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
        _fit(model, optimizer, x[hvd.rank()], y[hvd.rank()], 6, **options)
        reference = _build_model(keras.layers.BatchNormalization)
        _fit(reference, keras.optimizers.SGD(0.05, momentum=0.9), *whole, 6 * hvd.size(), **options)
        for ours, theirs in zip(model.variables, reference.variables, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        hvd.check_replicas(model, buffers=True)


def check_half_precision():
    model = _build_model(hvd.SyncBatchNormalization, keras.DTypePolicy("mixed_float16"))
    x = tf.ones((4, 4)) * (1.0 + hvd.rank()) * tf.range(4, dtype=tf.float32)[:, None]
    y = model(x, training=True)
    assert y.dtype == tf.float16
    assert np.isfinite(y).all()
    norm = next(layer for layer in model.layers if isinstance(layer, hvd.SyncBatchNormalization))
    assert norm.moving_mean.dtype == "float32"
    everyones = hvd.allgather_object(norm.moving_variance.numpy())
    np.testing.assert_array_equal(everyones[0], everyones[1])


def check_saving_and_options():
    model = keras.Sequential([keras.Input((4,)), hvd.SyncBatchNormalization(momentum=0.5)])
    model(tf.random.normal((3, 4)), training=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    assert isinstance(loaded.layers[0], hvd.SyncBatchNormalization)
    assert loaded.layers[0].momentum == 0.5
    np.testing.assert_allclose(loaded(tf.ones((2, 4))), model(tf.ones((2, 4))))
    for fused in (True, None):
        with pytest.raises(ValueError, match="fused"):
            hvd.SyncBatchNormalization(fused=fused)


if __name__ == "__main__":
    run_checks(globals())
