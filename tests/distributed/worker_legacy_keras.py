"""Keras 2 (TF_USE_LEGACY_KERAS=1): Horovod's own path, reached by hvdkit's names."""

import importlib
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tensorflow as hvd
import hvdkit.tensorflow.keras as hvd_keras
from hvdkit.errors import HvdkitError
from tests.distributed.worker import run_checks

ROWS, BATCH = 24, 6
callbacks = hvd_keras.callbacks


def _build_model(seed=0):
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3)])


def _fit(model, optimizer, whole=False, **options):
    """Two epochs on this rank's rows, or on everyone's as one process has them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS * hvd.size(), 4)).astype("float32")
    y, batch = np.tanh(x[:, :3]), BATCH * hvd.size()
    if not whole:
        parts = [a.reshape(-1, hvd.size(), BATCH, a.shape[-1])[:, hvd.rank()] for a in (x, y)]
        x, y, batch = *(part.reshape(ROWS, -1) for part in parts), BATCH
    model.compile(optimizer, "mse")
    return model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, **options)


def _assert_equal(model, reference, rtol=1e-5):
    for ours, theirs in zip(model.variables, reference.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6)
    hvd.check_replicas(model)


def check_training_equals_one_process():
    kinds = tf.keras.optimizers
    for make in (
        lambda: kinds.SGD(0.1, momentum=0.9),
        lambda: kinds.Adam(0.01),
        lambda: kinds.legacy.SGD(0.1, momentum=0.9),
        lambda: kinds.legacy.Adam(0.01),
    ):
        reference = _build_model()
        _fit(reference, make(), whole=True)
        for wrap in (hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer):
            model = _build_model()
            _fit(model, wrap(make()))
            _assert_equal(model, reference)


def check_op_and_groups_reach_the_reduction():
    for wrap in (hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer):
        model, reference = _build_model(), _build_model()
        _fit(model, wrap(tf.keras.optimizers.SGD(0.05), op=hvd.Sum, groups=1))
        _fit(reference, tf.keras.optimizers.SGD(0.05 * hvd.size()), whole=True)
        _assert_equal(model, reference)


def check_a_tape():
    model, reference = _build_model(), _build_model()
    everyones = [tf.ones((2, 4)) * (r + 1.0) for r in range(hvd.size())]

    def compute(model, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, tape

    loss, tape = compute(model, everyones[hvd.rank()])
    ours = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    loss, tape = compute(reference, tf.concat(everyones, 0))
    theirs = tape.gradient(loss, reference.trainable_variables)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def check_callbacks():
    model = _build_model(seed=hvd.rank())
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1 * hvd.size()))
    history = _fit(
        model,
        optimizer,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=1),
            callbacks.LearningRateScheduleCallback(0.1 * hvd.size(), lambda epoch: 0.1, 1),
        ],
    ).history
    hvd.check_replicas(model)
    everyones = hvd.allgather_object(history["loss"])
    assert all(losses == everyones[0] for losses in everyones)
    assert float(optimizer.learning_rate) == pytest.approx(0.01 * hvd.size())


def check_a_momentum_that_cannot_be_corrected_is_named():
    def fit(make, **options):
        warm_up = callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, **options)
        optimizer = hvd_keras.DistributedOptimizer(make(0.1, momentum=0.9))
        _fit(_build_model(), optimizer, callbacks=[warm_up])

    with pytest.raises(HvdkitError, match="momentum_correction=False"):
        fit(tf.keras.optimizers.SGD)
    fit(tf.keras.optimizers.SGD, momentum_correction=False)
    fit(tf.keras.optimizers.legacy.SGD)


def check_loss_scaling_goes_around_the_wrapped_optimizer():
    scale = tf.keras.mixed_precision.LossScaleOptimizer
    for wrap in (hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer):
        with pytest.raises(HvdkitError, match=r"LossScaleOptimizer\(hvd\.DistributedOptimizer"):
            wrap(scale(tf.keras.optimizers.SGD(0.1)))
        model, reference = _build_model(), _build_model()
        _fit(model, scale(wrap(tf.keras.optimizers.SGD(0.1))))
        _fit(reference, tf.keras.optimizers.SGD(0.1), whole=True)
        _assert_equal(model, reference)


def check_saving_and_loading():
    model = _build_model()
    _fit(model, hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.h5"))
        model.save(path)
        loaded = hvd_keras.load_model(path)
        plain = tf.keras.models.load_model(path)
        with pytest.raises(HvdkitError, match=r"save the model as \.h5"):
            hvd_keras.load_model(path.replace(".h5", ".keras"))
    assert not hasattr(plain.optimizer, "register_local_var")
    assert hasattr(loaded.optimizer, "register_local_var")
    for one in (loaded, model):
        one.fit(np.full((4, 4), hvd.rank() + 1.0), np.ones((4, 3)), verbose=0)
    _assert_equal(loaded, model)
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def check_elastic_states():
    for make in (hvd.elastic.TensorFlowKerasState, hvd_keras.elastic.KerasState):
        model = _build_model(seed=hvd.rank())
        model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), "mse")
        state = make(model, batch=hvd.rank())
        state.sync()
        hvd.check_replicas(model)
        saved = model.get_weights()
        model.set_weights([w + 1 for w in saved])
        state.restore()
        for now, then in zip(model.get_weights(), saved, strict=True):
            np.testing.assert_array_equal(now, then)
        assert state.batch == 0


def check_local_layers_stay_local():
    model = _build_model(seed=hvd.rank())
    optimizer = hvd_keras.PartialDistributedOptimizer(
        tf.keras.optimizers.SGD(0.1), local_layers=model.layers[-1]
    )
    _fit(model, optimizer)
    weights = hvd.allgather_object(model.get_weights()[0])
    assert not np.allclose(weights[0], weights[1])


def check_batch_norm_over_all_ranks():
    x = np.random.default_rng(0).standard_normal((hvd.size(), 6, 4)).astype("float32")
    layer, reference = hvd.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    ours = layer(x[hvd.rank()], training=True)
    theirs = reference(x.reshape(-1, 4), training=True).numpy().reshape(x.shape)
    np.testing.assert_allclose(ours, theirs[hvd.rank()], rtol=1e-4, atol=1e-5)


def check_what_is_not_for_keras_2_says_so():
    with pytest.raises(ValueError, match="need a Keras 3 optimizer; SGD is none"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), clip_grad_norm=1.0)
    with pytest.raises(ValueError, match="op=Average"):
        hvd.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.1), op=hvd.Sum, gradient_predivide_factor=2.0
        )
    with pytest.raises(TypeError, match=r"of tf_keras, got keras.*hvdkit\.tensorflow\.Dist"):
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(TypeError, match=r"of tf_keras, got builtins\.int"):
        hvd.DistributedOptimizer(3)
    module = importlib.import_module("hvdkit.keras")
    with pytest.raises(TypeError, match=r"got tf_keras.*SGD; .*hvdkit\.tensorflow\.keras"):
        module.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
    model = _build_model()
    model.compile("adam", "mse")
    with pytest.raises(HvdkitError, match=r"Keras 3.*BroadcastGlobalVariablesCallback"):
        hvd.broadcast_initial_state(model)


def check_keras_3_beside_it_still_averages():
    variable = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([float(hvd.rank())])], [variable])
    np.testing.assert_allclose(variable, [1.0 - sum(range(hvd.size())) / hvd.size()])


def check_modules_by_horovods_names():
    for name in ("callbacks", "elastic"):
        module = importlib.import_module(f"hvdkit.tensorflow.keras.{name}")
        assert module is getattr(hvd_keras, name)


if __name__ == "__main__":
    run_checks(globals())
