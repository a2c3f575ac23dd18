"""Distributed equals single: every way to an update, in Keras, on the backend of KERAS_BACKEND."""

import keras
import numpy as np
import pytest
from keras import ops

import hvdkit.keras as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError
from tests.distributed.keras_training import (
    CLASSES,
    FEATURES,
    ROWS,
    assert_equal_models,
    build_model,
    compile_model,
    fit,
    make_data,
    read_weights,
    take_part,
)
from tests.distributed.worker import run_checks

TENSORFLOW = keras.backend.backend() == "tensorflow"
if TENSORFLOW:
    import tensorflow as tf

OPTIMIZERS = {
    "SGD": lambda **kw: keras.optimizers.SGD(0.1, momentum=0.9, **kw),
    "Adam": lambda **kw: keras.optimizers.Adam(0.01, epsilon=1e-3, **kw),
    "AdamW": lambda **kw: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, **kw),
    "Lion": lambda **kw: keras.optimizers.Lion(0.01, **kw),
    "LossScale": lambda **kw: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, **kw)),
}


def _compare_fit(make, data, build=build_model, atol=2e-6, model_options=None, **wrap_options):
    model = compile_model(
        build(), hvd.DistributedOptimizer(make(), **wrap_options), **(model_options or {})
    )
    reference = compile_model(build(), make(), **(model_options or {}))
    fit(model, data)
    fit(reference, data, whole=True)
    assert_equal_models(model, reference, atol=atol)
    return model


def check_ranks_with_another_past_agree():
    """Layers, optimizers and operations are numbered as a process makes them."""
    if hvd.rank() == 1:
        for _ in range(3):
            keras.optimizers.SGD(0.1)
            build_model()
    _compare_fit(lambda: keras.optimizers.SGD(0.1), make_data(2))
    hvd.broadcast_initial_state(build_model(seed=hvd.rank()))
    hvd.average_buffers(keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()]))


def check_c1_other_rows_on_each_rank():
    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    rng = np.random.default_rng(5)
    data = rng.standard_normal((64, 4)).astype("float32"), rng.integers(0, 3, 64)
    _compare_fit(lambda: keras.optimizers.SGD(0.1), data, build, atol=1e-6)


def check_fit_with_each_optimizer():
    for name, make in OPTIMIZERS.items():
        print(f"rank {hvd.rank()}: {name}")
        _compare_fit(make, make_data(4), atol=1e-5)


def check_shares_are_together_the_batches_of_one_process():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((45, FEATURES)).astype("float32"), rng.integers(0, CLASSES, 45)
    inputs, targets = hvd.shard((x, y), seed=3)
    assert len(inputs) == len(targets) == 23  # one sample is repeated
    everyone = np.stack(hvd.allgather(inputs[None]), axis=1).reshape(-1, FEATURES)
    assert {row.tobytes() for row in everyone} == {row.tobytes() for row in x}
    assert not np.array_equal(everyone[:45], x), "the order is the old one"
    labels = {row.tobytes(): label for row, label in zip(x, y, strict=True)}
    whole = everyone, np.array([labels[row.tobytes()] for row in everyone])

    model = compile_model(build_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    reference = compile_model(build_model(), keras.optimizers.SGD(0.1))
    model.fit(inputs, targets, batch_size=4, epochs=2, shuffle=False, verbose=0)
    reference.fit(*whole, batch_size=4 * hvd.size(), epochs=2, shuffle=False, verbose=0)
    assert_equal_models(model, reference)

    kept = hvd.shard({"x": x}, shuffle=False, drop_last=True)
    np.testing.assert_array_equal(kept["x"], x[hvd.rank() : 44 : 2])
    with pytest.raises(HvdkitError, match=r"lengths \[44, 45\]"):
        hvd.shard((x, y[:44]))
    with pytest.raises(RankDisagreementError, match="seed"):
        hvd.shard((x, y), seed=hvd.rank())


def check_fit_eagerly():
    for name in ("SGD", "LossScale"):
        _compare_fit(OPTIMIZERS[name], make_data(3), model_options={"run_eagerly": True})


def check_several_steps_in_one_call():
    if TENSORFLOW:
        options = {"steps_per_execution": 3}
        _compare_fit(OPTIMIZERS["Adam"], make_data(6), atol=1e-5, model_options=options)


def check_accumulation_in_fit():
    data = make_data(6)
    # By Keras's own option, and by Horovod's: a mean or a sum of the passes.
    _compare_fit(lambda: OPTIMIZERS["Adam"](gradient_accumulation_steps=3), data, atol=1e-5)
    for average, rate in ((True, 0.1), (False, 0.3)):
        model = compile_model(
            build_model(),
            hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.1),
                backward_passes_per_step=3,
                average_aggregated_gradients=average,
            ),
        )
        reference = compile_model(
            build_model(), keras.optimizers.SGD(rate, gradient_accumulation_steps=3)
        )
        fit(model, data)
        fit(reference, data, whole=True)
        assert_equal_models(model, reference)


def _step_model():
    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            if TENSORFLOW:
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x, training=True))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
            else:
                self.zero_grad()
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
                loss.backward()
                gradients = [v.value.grad for v in self.trainable_variables]
                self.optimizer.apply_gradients(
                    zip(gradients, self.trainable_variables, strict=True)
                )
            return {"loss": loss}

    keras.utils.set_random_seed(3)
    return Model([keras.Input((FEATURES,)), keras.layers.Dense(5), keras.layers.Dense(CLASSES)])


def check_a_custom_train_step():
    _compare_fit(OPTIMIZERS["SGD"], make_data(3), _step_model)


def check_loops_inside_and_outside_of_a_function():
    """Loops of the user's own, without fit; on TensorFlow traced as well."""
    data = make_data(4)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for traced in (False, True) if TENSORFLOW else (False,):
        pair = []
        for whole in (False, True):
            model, optimizer = build_model(), OPTIMIZERS["Adam"]()
            if not whole:
                hvd.DistributedOptimizer(optimizer)
            x, y = data if whole else take_part(*data)
            size = ROWS * (hvd.size() if whole else 1)

            def step(x, y, model=model, optimizer=optimizer):
                variables = model.trainable_variables
                if TENSORFLOW:
                    with tf.GradientTape() as tape:
                        loss = loss_of(y, model(x))
                    gradients = tape.gradient(loss, variables)
                    optimizer.apply_gradients(zip(gradients, variables, strict=True))
                else:
                    model.zero_grad()
                    loss_of(y, model(x)).backward()
                    optimizer.apply([v.value.grad for v in variables], variables)

            run = tf.function(step, reduce_retracing=True) if traced else step
            for start in range(0, len(x), size):
                rows = slice(start, start + size)
                run(ops.convert_to_tensor(x[rows]), ops.convert_to_tensor(y[rows]))
            pair.append(model)
        assert_equal_models(*pair, atol=1e-5)


def check_c13_loss_scaling_with_an_inf_on_one_rank():
    x, y = make_data(3)
    bad = x.copy()
    bad[ROWS * hvd.size()] = np.inf  # the second batch, on rank 0
    for eagerly in (False, True):
        make = OPTIMIZERS["LossScale"]
        model = compile_model(build_model(), hvd.DistributedOptimizer(make()), run_eagerly=eagerly)
        fit(model, (bad, y))
        assert float(ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 2.0**14
        assert int(model.optimizer.inner_optimizer.iterations) == 2
        reference = compile_model(build_model(), make())
        rows = np.r_[0 : ROWS * 2, ROWS * 4 : ROWS * 6]
        fit(reference, (x[rows], y[rows]), whole=True)
        assert_equal_models(model, reference)


def check_sparse_embeddings():
    rng = np.random.default_rng(2)
    data = rng.integers(0, 9, (48, 3)), rng.integers(0, CLASSES, 48)

    def build():
        keras.utils.set_random_seed(4)
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(9, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(CLASSES),
            ]
        )

    # Keras's Adam squares the rows of equal tokens one by one, so dense gradients differ there.
    _compare_fit(OPTIMIZERS["Adam"], data, build, atol=1e-5)
    _compare_fit(lambda: keras.optimizers.SGD(0.1), data, build, sparse_as_dense=True)
    model = compile_model(build(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), op=hvd.Sum))
    reference = compile_model(build(), keras.optimizers.SGD(0.1))
    fit(model, data)
    fit(reference, data, whole=True)
    assert_equal_models(model, reference)
    for clip in ({"clipnorm": 0.05}, {"global_clipnorm": 0.05}):
        _compare_fit(lambda clip=clip: keras.optimizers.SGD(0.5, **clip), data, build, atol=1e-5)


def check_frozen_layers():
    data = make_data(3)

    def build():
        model = build_model()
        model.layers[0].trainable = False
        return model

    model = _compare_fit(OPTIMIZERS["AdamW"], data, build)
    np.testing.assert_array_equal(
        model.layers[0].kernel.numpy(), build_model().layers[0].kernel.numpy()
    )
    model.layers[0].trainable = True
    compile_model(model, hvd.DistributedOptimizer(OPTIMIZERS["SGD"]()))
    before = read_weights(model)[0]
    fit(model, data)
    assert not np.array_equal(read_weights(model)[0], before)
    hvd.check_replicas(model)


def check_two_models_with_an_optimizer_each():
    data = make_data(3)
    models = [
        compile_model(build_model(seed), hvd.DistributedOptimizer(OPTIMIZERS["SGD"]()))
        for seed in (0, 1)
    ]
    for part in range(3):
        rows = slice(part * ROWS * hvd.size(), (part + 1) * ROWS * hvd.size())
        for model in models:
            fit(model, (data[0][rows], data[1][rows]))
    for seed, model in enumerate(models):
        reference = compile_model(build_model(seed), OPTIMIZERS["SGD"]())
        fit(reference, data, whole=True)
        assert_equal_models(model, reference)


def check_a_layer_that_one_rank_does_not_use():
    """Its gradient is None there on PyTorch, and zeros elsewhere."""
    if TENSORFLOW:
        return  # there a graph has it or not, on every rank
    model = build_model()
    extra = keras.Variable(np.ones(3, "float32"))
    unused = keras.Variable(np.ones(3, "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, weight_decay=0.1))
    x = ops.convert_to_tensor(make_data(1)[0])
    for _ in range(2):
        before = extra.numpy()
        loss = ops.mean(model(x))
        if hvd.rank() == 1:
            loss = loss + 4 * ops.sum(extra)
        loss.backward()
        variables = [*model.trainable_variables, extra, unused]
        optimizer.apply([v.value.grad for v in variables], variables)
        np.testing.assert_allclose(extra.numpy(), before * 0.95 - 0.5 * 2.0, rtol=1e-6)
        for v in variables:
            v.value.grad = None
    np.testing.assert_array_equal(unused.numpy(), np.ones(3))
    hvd.check_replicas(model)


class _Holder(keras.optimizers.Optimizer):
    """Hands gradients on to the optimizer that it holds."""

    def __init__(self, held):
        super().__init__(learning_rate=0.0)
        self.held = held

    def build(self, variables):
        super().build(variables)
        self.held.build(variables)

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        self.held.apply(grads, trainable_variables)


def check_an_optimizer_that_holds_another_averages():
    for inner in ("SGD", "Adam"):
        _compare_fit(lambda inner=inner: _Holder(OPTIMIZERS[inner]()), make_data(3), atol=1e-5)
    loss_scale = keras.optimizers.LossScaleOptimizer
    _compare_fit(lambda: loss_scale(_Holder(OPTIMIZERS["SGD"]())), make_data(3), atol=1e-5)
    with pytest.raises((ValueError, RankDisagreementError), match="several optimizers"):
        hvd.DistributedOptimizer(_Holder(OPTIMIZERS["SGD"]()), clip_grad_norm=1.0)
    with pytest.raises((HvdkitError, RankDisagreementError), match="wrapped already"):
        hvd.DistributedOptimizer(_Holder(hvd.DistributedOptimizer(OPTIMIZERS["SGD"]())))
    # Wrapped inside: fit keeps out of XLA all the same.
    held = hvd.DistributedOptimizer(OPTIMIZERS["SGD"]())
    model = compile_model(build_model(), _Holder(held))
    assert not model.jit_compile
    fit(model, make_data(2))
    hvd.check_replicas(model)


def check_scales_of_float8_are_the_largest_of_all_ranks():
    """Their gradients overwrite them, by no update of the optimizer."""
    x, y = make_data(3)
    x[np.arange(len(x)) // ROWS % hvd.size() > 0] *= 4  # but those of rank 0

    def build():
        model = build_model()
        model.quantize("float8")
        return model

    for passes in (None, 3):
        options = {"gradient_accumulation_steps": passes}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, **options))
        model = compile_model(build(), optimizer)
        reference = compile_model(build(), keras.optimizers.SGD(0.01, **options))
        fit(model, (x, y))
        fit(reference, (x, y), whole=True)
        hvd.check_replicas(model)
        for ours, theirs in zip(model.layers, reference.layers, strict=True):
            found, expected = ours.inputs_amax_history, theirs.inputs_amax_history
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-2)


def check_gradients_that_are_views_with_strides():
    whole = np.arange(12, dtype="float32").reshape(3, 4)
    variable = keras.Variable(np.zeros((4, 3), "float32"))
    gradient = ops.transpose(ops.convert_to_tensor(whole * (hvd.rank() + 1)))
    hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([gradient], [variable])
    factor = (hvd.size() + 1) / 2
    np.testing.assert_allclose(variable.numpy(), -factor * whole.T)
    np.testing.assert_allclose(hvd.allreduce(whole.T * (hvd.rank() + 1)), factor * whole.T)
    np.testing.assert_array_equal(hvd.broadcast(whole.T, 0), whole.T)
    np.testing.assert_array_equal(hvd.allgather(whole.T), np.concatenate([whole.T] * hvd.size()))


if __name__ == "__main__":
    run_checks(globals())
