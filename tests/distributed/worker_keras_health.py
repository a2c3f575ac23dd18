"""What Keras does when a loss or gradient of one rank is not finite; on either backend."""

import json
import os
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import HvdkitError, NonFiniteError, RankDisagreementError
from hvdkit.keras.collectives import allgather_object
from tests.distributed.keras_training import (
    assert_equal_models,
    build_model,
    compile_model,
    fit,
    make_data,
    read_weights,
)
from tests.distributed.worker import run_checks

# Made and removed by the test: a check that fails ends its process at once.
SCRATCH = Path(os.environ["HVDKIT_TEST_SCRATCH"])


def _culprit():
    return hvd.size() - 1


def _make(optimizer=None, **options):
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    return compile_model(build_model(), hvd.DistributedOptimizer(optimizer, **options))


def _spoiled(batches, bad):
    """Rows of all ranks; in the batches ``bad`` the last row of the last rank is not finite."""
    x, y = make_data(batches)
    x = x.copy()
    rows = len(x) // batches
    for batch in bad:
        x[(batch + 1) * rows - 1] = np.nan
    return x, y


class Look(keras.callbacks.Callback):
    """Notes all variables before each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        variables = [*self.model.trainable_variables, *inner.variables]
        self.seen.append([np.array(v.numpy()) for v in variables])


def _equal(ours, theirs):
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


def _log(name):
    path = SCRATCH / f"{name}.{keras.backend.backend()}.jsonl"
    events = hvd.EventLog(path)

    def read():
        allgather_object(None, name="tests.barrier", process_set=hvd.global_process_set)
        return [json.loads(line) for line in path.read_text().splitlines()]

    return events, read


def check_a_batch_on_one_rank_is_left_out_on_all():
    kinds = [
        (keras.optimizers.Adam(0.01), {}),
        (keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01), {"clip_grad_norm": 0.5}),
        (keras.optimizers.SGD(0.1), {"op": hvd.Sum, "bucket_size_mb": 1e-4}),
        (keras.optimizers.AdamW(0.01), {"compression": hvd.Compression.fp16}),
    ]
    for number, (optimizer, options) in enumerate(kinds):
        events, read = _log(f"out{number}")
        model, look = _make(optimizer, **options), Look()
        health = hvd.callbacks.HealthCallback(events=events)
        fit(model, _spoiled(4, [2]), callbacks=[health, look])
        look.on_train_batch_begin(4)
        before, after = look.seen[2], look.seen[3]
        assert _equal(before, after), number
        assert not _equal(look.seen[1], before)
        assert not _equal(after, look.seen[4])
        hvd.check_replicas(model)
        [event] = read()
        assert (event["kind"], event["step"], event["rank"]) == ("nonfinite", 2, _culprit())
        assert (
            f"gradients of rank {_culprit()} are not finite; every rank skips" in event["message"]
        )
        # The next fit is watched no more, and the step compiled anew.
        fit(model, _spoiled(1, [0]))
        assert np.isnan(read_weights(model)[0]).any()


def check_a_healthy_fit_is_the_same():
    models = []
    for callbacks in ([], [hvd.callbacks.HealthCallback(window=2)]):
        model = _make(keras.optimizers.SGD(0.1, momentum=0.9))
        fit(model, make_data(5), epochs=2, callbacks=callbacks)
        models.append(model)
    assert_equal_models(*models, atol=0 if hvd.size() == 2 else 2e-6)


def check_accumulation_goes_on_after_a_bad_window():
    model, look = _make(keras.optimizers.SGD(0.1), backward_passes_per_step=2), Look()
    fit(model, _spoiled(6, [2]), callbacks=[hvd.callbacks.HealthCallback(), look])
    look.on_train_batch_begin(6)
    weights = [seen[:4] for seen in look.seen]
    assert not _equal(weights[1], weights[2])
    assert _equal(weights[2], weights[4])
    assert not _equal(weights[5], weights[6])
    assert all(np.isfinite(w).all() for w in weights[6])
    hvd.check_replicas(model)


def check_raise_raises_on_every_rank():
    for batches, bad in ((4, 1), (2, 1)):  # in the middle, and in the last batch
        model = _make()
        with pytest.raises(NonFiniteError, match=rf"step 1: gradients of rank {_culprit()} are"):
            fit(
                model,
                _spoiled(batches, [bad]),
                callbacks=[hvd.callbacks.HealthCallback(nonfinite="raise")],
            )
        assert all(np.isfinite(w).all() for w in read_weights(model))


def check_skips_are_limited():
    with pytest.raises(NonFiniteError, match=r"step 4: .*after 2 skipped updates in a row"):
        fit(
            _make(),
            _spoiled(6, [0, 2, 3, 4]),
            callbacks=[hvd.callbacks.HealthCallback(max_skips=2)],
        )


def check_rollback():
    store = hvd.CheckpointStore(SCRATCH / f"back.{keras.backend.backend()}")
    events, read = _log("back")

    class Save(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                store.save(1, self.model, self.model.optimizer, epoch=7)

    model, look = _make(keras.optimizers.SGD(0.4)), Look()
    health = hvd.callbacks.HealthCallback(
        nonfinite="rollback", store=store, max_rollbacks=2, events=events
    )
    with pytest.raises(NonFiniteError, match="after 2 rollbacks"):
        fit(model, _spoiled(8, [3, 5, 7]), callbacks=[health, Save(), look])
    assert _equal(look.seen[4][:4], look.seen[1][:4])
    assert _equal(look.seen[6][:4], look.seen[1][:4])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    kinds = [event["kind"] for event in read()]
    assert kinds == ["nonfinite", "rollback", "nonfinite", "rollback", "nonfinite"]
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = _make(keras.optimizers.SGD(schedule))
    with pytest.raises(HvdkitError, match="ExponentialDecay, which compiled steps"):
        hvd.HealthMonitor(model, nonfinite="rollback", store=store)


def check_local_gradients_are_agreed_about():
    model, look = _make(keras.optimizers.SGD(0.1)), Look()
    for variable in model.trainable_variables:
        model.optimizer.register_local_var(variable)
    fit(model, _spoiled(3, [1]), callbacks=[hvd.callbacks.HealthCallback(), look])
    assert _equal(look.seen[1], look.seen[2])


def check_loss_scaling_skips_by_itself():
    events, read = _log("scale")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    model = compile_model(build_model(), hvd.DistributedOptimizer(optimizer))
    health = hvd.callbacks.HealthCallback(nonfinite="raise", events=events)
    fit(model, _spoiled(4, [2]), callbacks=[health])
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 32.0
    [event] = read()
    assert (event["severity"], event["step"]) == ("info", 2)
    assert all(np.isfinite(w).all() for w in read_weights(model))


def check_a_straggler_a_spike_and_figures_are_found_in_windows():
    class Board:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, name, value, step):
            self.scalars[name, step] = value

        def add_text(self, *args):
            pass

        def flush(self):
            pass

    class Slow(keras.layers.Layer):
        def call(self, inputs):
            if keras.backend.backend() == "torch":
                wait(None)
                return inputs
            import tensorflow as tf

            with tf.control_dependencies([tf.py_function(wait, [inputs], [])]):
                return tf.identity(inputs)

        def compute_output_shape(self, shape):
            return shape

    slow = []

    def wait(_):
        if slow and hvd.rank() == 1:
            time.sleep(0.05)

    class Steer(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            slow[:] = [True] if batch >= 40 else []

    board = Board()
    events, read = _log("window")
    events.close()
    events = hvd.EventLog(events.path, tensorboard=board)
    model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(3)])
    compile_model(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    x, y = make_data(60)
    x = x.copy()
    rows = len(x) // 60
    x[30 * rows : 31 * rows] *= 1000
    health = hvd.callbacks.HealthCallback(window=20, straggler_factor=6.0, events=events)
    # Whose losses are no spike: they are not those of the last batch.
    validation = {"validation_data": (x * 1000, y), "validation_batch_size": len(x)}
    fit(model, (x, y), callbacks=[health, Steer()], **validation)
    assert health.monitor.steps == 60
    told = read()
    assert [event["step"] for event in told if event["kind"] == "loss_spike"] == [30]
    assert [e["rank"] for e in told if e["kind"] == "straggler" and e["step"] == 59] == [1]
    if hvd.rank() == 0:
        assert {step for _, step in board.scalars} == {19, 39, 59}
        share = [board.scalars[f"hvdkit/wait_share/{rank}", 59] for rank in (0, 1)]
        assert share[0] > 0.5 > share[1]


def check_without_windows_nothing_piles_up():
    model = _make()
    x, y = make_data(30)
    health = hvd.callbacks.HealthCallback(window=None)
    fit(model, (x, y), callbacks=[health])
    held = [len(value) for value in vars(health.monitor).values() if isinstance(value, list)]
    assert health.monitor.steps == 30
    assert sum(held) < 20, held


def check_arguments():
    model = _make()
    for wrong, text in [
        ({"nonfinite": "ignore"}, "nonfinite must be one of skip, raise, rollback"),
        ({"nonfinite": "rollback"}, "needs store"),
        ({"window": 0}, "window must be at least 1"),
    ]:
        with pytest.raises(HvdkitError, match=text):
            hvd.HealthMonitor(model, **(wrong if hvd.rank() == 1 else {}))
    with pytest.raises(RankDisagreementError, match="'window': rank"):
        hvd.HealthMonitor(model, window=10 + (hvd.rank() == 1))
    with pytest.raises(HvdkitError, match="needs a Keras 3 optimizer, not NoneType"):
        hvd.HealthMonitor(build_model())


if __name__ == "__main__":
    run_checks(globals())
