"""Ranks that disagree are told so alike, and replicas that differ are mended; Keras."""

import os

import keras
import numpy as np
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError, ReplicaMismatchError
from hvdkit.keras.collectives import allgather_object
from tests.distributed.worker import run_checks


def gather(obj):
    return allgather_object(obj, name="tests.gather", process_set=hvd.global_process_set)


def is_odd():
    return hvd.rank() == hvd.size() - 1


def sides(first, second):
    """The pattern of a message that names the ranks on each side."""
    last = hvd.size() - 1
    alike = "rank 0 has" if last == 1 else f"ranks {', '.join(map(str, range(last)))} have"
    return f"{alike} {first}.*; rank {last} has {second}"


def fails(match, call, error=RankDisagreementError):
    with pytest.raises(error, match=match) as caught:
        call()
    assert len(set(gather(str(caught.value)))) == 1, str(caught.value)
    return caught.value


def build(units=5, seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(units), keras.layers.BatchNormalization()]
    )


def start(optimizer=None, model=None, **options):
    model = model or build()
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(hvd.DistributedOptimizer(optimizer, **options), "mse")
    return model


def train(model, batches=1, callbacks=()):
    rng = np.random.default_rng(hvd.rank())
    x = rng.standard_normal((2 * batches, 4)).astype("float32")
    y = np.ones((2 * batches, model.output_shape[1]), "float32")
    model.fit(x, y, batch_size=2, verbose=0, callbacks=list(callbacks))


def spoil(variable, by=1.0):
    if is_odd():
        variable.assign(variable + by)


def check_versions_are_compared():
    version = keras.__version__
    try:
        if is_odd():
            keras.__version__ = "1.2.3"
        fails(f"'version of Keras': {sides(version, '1.2.3')}", start)
        model = build()
        fails("'version of Keras'", lambda: hvd.broadcast_initial_state(model))
    finally:
        keras.__version__ = version


def check_one_rank_with_another_model_or_optimizer_is_named():
    odd = is_odd()
    fails(
        f"'class': {sides('.*SGD', '.*Adam')}",
        lambda: start(keras.optimizers.Adam(0.1) if odd else None),
    )
    model = start(model=build(5 + odd))
    fails(rf"gradient 0.*{sides('float32 .4, 5.', 'float32 .4, 6.')}", lambda: train(model))


def check_hyper_parameters_are_compared_at_the_first_reduction():
    odd = is_odd()
    optimizers, schedules = keras.optimizers, keras.optimizers.schedules
    for make, label, first, second in [
        (lambda: optimizers.SGD(0.1, 0.5 + odd / 4), "momentum of SGD", "0.5", "0.75"),
        (lambda: optimizers.Adam(0.1, 0.5 + odd / 4), "beta_1 of Adam", "0.5", "0.75"),
        (lambda: keras.optimizers.SGD(0.1, nesterov=odd), "nesterov of SGD", "False", "True"),
        (
            lambda: keras.optimizers.SGD(schedules.ExponentialDecay(0.1, 10 + odd, 0.5)),
            "decay_steps of config of learning_rate of SGD",
            "10",
            "11",
        ),
    ]:
        model = start(make())
        fails(f"'{label}': {sides(first, second)}", lambda: train(model))  # noqa: B023
        plain = make()
        fails(f"'{label}'", lambda: hvd.broadcast_initial_state(build(), plain))  # noqa: B023
    # What a broadcast makes equal may differ at first, even in the first step.
    model = start(keras.optimizers.SGD(0.1 + odd, name="other" if odd else "sgd"))
    train(model, 3, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    hvd.check_replicas(model, optimizer=model.optimizer)


def check_the_largest_difference_is_told_for_every_dtype():
    for dtype, values, others, expected in [
        ("float32", [1.0, -2.0, 3.0], [1.0, 0.5, 3.25], 2.5),
        ("bfloat16", [1.0, 2.0], [1.0, 4.0], 2.0),
        ("float16", [np.inf, 1.0], [np.inf, 2.0], 1.0),
        ("float32", [np.nan, 1.0], [np.nan, 3.0], 2.0),
        ("float32", [np.nan, 1.0], [0.0, 1.0], np.nan),
        ("float32", [0.0], [-0.0], 0.0),
        ("int64", [2**62, 5], [2**62 + 1, 5], 1.0),
        ("uint8", [255], [0], 255.0),
        ("bool", [True, False], [True, True], 1.0),
    ]:
        held = others if is_odd() else values
        if dtype == "bfloat16":
            initial = keras.ops.convert_to_tensor(held, dtype)
        else:
            initial = np.array(held, dtype)
        model = Holder([keras.Variable(initial, dtype=dtype, trainable=False, name="x")])
        error = fails(
            f"first at '0 .x.': {sides(dtype, dtype)}.*largest difference from rank 0: ",
            lambda: hvd.check_replicas(model),  # noqa: B023
            ReplicaMismatchError,
        )
        assert error.ranks == (hvd.size() - 1,)
        assert str(error.largest_difference) == str(expected), (dtype, values, others)


class Holder:
    """Variables that are compared as a model's are."""

    def __init__(self, variables):
        self.trainable_variables = self.variables = variables


def check_every_small_change_is_found():
    base = np.random.default_rng(5).standard_normal(300_001).astype("float32")
    for places, change in [
        ([0, 1], lambda x: x[::-1]),
        ([7, 7 + 65536], lambda x: x[::-1]),
        ([11, 12], np.negative),
        ([11, 11 + 65536, 11 + 2 * 65536, 11 + 3 * 65536], np.negative),
        ([300_000], lambda x: np.nextafter(x, 9, dtype=x.dtype)),
    ]:
        changed = base.copy()
        if is_odd():
            changed[places] = change(changed[places])
        small = keras.Variable(np.ones(3, "float32"), name="small")
        hvd.check_replicas(Holder([small, keras.Variable(base, name="x")]))
        fails(
            "first at '1 .x.'",
            lambda: hvd.check_replicas(Holder([small, keras.Variable(changed, name="x")])),  # noqa: B023
            ReplicaMismatchError,
        )


def check_optimizer_variables_are_compared():
    model = start()
    train(model, 2)
    hvd.check_replicas(model, optimizer=model.optimizer)
    slot = next(v for v in model.optimizer.variables if v.name.endswith("kernel_momentum"))
    spoil(slot, 0.5)
    hvd.check_replicas(model)
    error = fails(
        "kernel_momentum",
        lambda: hvd.check_replicas(model, optimizer=model.optimizer),
        ReplicaMismatchError,
    )
    assert error.largest_difference == pytest.approx(0.5)
    hvd.broadcast_initial_state(model)
    model.optimizer.learning_rate = 0.1 + 0.1 * is_odd()
    fails(
        "learning_rate",
        lambda: hvd.check_replicas(model, optimizer=model.optimizer),
        ReplicaMismatchError,
    )
    # What stays on a rank: slots of local variables, and sums over passes.
    model = start(backward_passes_per_step=3)
    model.optimizer.register_local_var(model.layers[0].kernel)
    train(model, 5)
    if hvd.size() > 1:
        kernels = gather(model.layers[0].kernel.numpy().tolist())
        assert kernels[0] != kernels[1]
    hvd.check_replicas(model, optimizer=model.optimizer)


def check_a_loop_of_ones_own_is_checked():
    model = build()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    check = hvd.ReplicaCheck(model, optimizer, steps=3)
    for _ in range(5):
        check.step()
    spoil(optimizer.variables[-1])
    error = fails("momentum", check.step, ReplicaMismatchError)
    assert (error.largest_difference, check.mismatches, check.steps_seen) == (1.0, 1, 6)
    odd = hvd.ReplicaCheck(model, optimizer, steps=4 + is_odd())
    fails(f"'steps': {sides('4', '5')}", odd.step)


def check_the_callback_resynchronizes_and_rolls_back():
    class Break(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                spoil(self.model.layers[0].kernel)

    model = start()
    callback = hvd.callbacks.ReplicaCheckCallback(2, on_mismatch="resync")
    train(model, 6, [Break(), callback])
    assert (callback.check.mismatches, callback.check.steps_seen) == (1, 6)
    hvd.check_replicas(model, optimizer=model.optimizer)
    train(model, 1, [callback])
    assert callback.check.steps_seen == 7

    model = start()
    train(model, 2)
    store = hvd.CheckpointStore(os.path.join(os.environ["HVDKIT_TEST_SCRATCH"], "rollback"))
    store.save(2, model, model.optimizer, epoch=1)
    kept = [v.numpy().copy() for v in model.trainable_variables]
    callback = hvd.callbacks.ReplicaCheckCallback(2, on_mismatch="rollback", store=store)
    train(model, 2, [Break(), callback])
    assert (callback.check.restored["epoch"], callback.check.restored["step"]) == (1, 2)
    for one, other in zip(kept, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(one, other.numpy())
    with pytest.raises(HvdkitError, match="needs store"):
        hvd.callbacks.ReplicaCheckCallback(on_mismatch="rollback")


if __name__ == "__main__":
    run_checks(globals())
