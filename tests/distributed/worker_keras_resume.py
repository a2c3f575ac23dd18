"""Runs of Keras that are interrupted in the middle of an epoch; see test_keras_resume.py."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import is_tensorflow
from hvdkit.keras.collectives import allgather_object
from tests.distributed.worker import run_checks

SCRATCH = Path(os.environ["HVDKIT_TEST_SCRATCH"])
SAMPLES, BATCH, EPOCHS = 44, 2, 3
STEPS = 11  # of an epoch, with two workers


class InterruptedError(Exception):
    """Ends training as Ctrl-C would."""


class Watch(keras.callbacks.Callback):
    """Notes the loss of each batch that is trained on, and interrupts."""

    def __init__(self, stop_at=None, interrupt=None):
        super().__init__()
        self.losses, self.stop_at, self.interrupt = {}, stop_at, interrupt

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.stop_at:
            self.interrupt()

    def on_train_batch_end(self, batch, logs=None):
        if self.model.train_function.__name__ != "_leave_out":
            self.losses[f"{self.epoch} {batch}"] = float(logs["loss"]).hex()


def interrupt():
    raise InterruptedError


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def make_model(steps_per_execution=1):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


def make_data():
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((SAMPLES, 3), np.float32)
    return inputs, np.sin(inputs.sum(1, keepdims=True))


def fit(name=None, stop_at=None, interrupt=None, kind="arrays", steps_per_execution=1):
    """Train; return the loss of each batch, the logs of each epoch, and the weights."""
    model = make_model(steps_per_execution)
    options, share = {"shuffle": False}, None
    if kind == "arrays":
        inputs, targets = hvd.shard(make_data())
        arguments, options = (inputs, targets), options | {"batch_size": BATCH}
    else:
        from hvdkit.tensorflow import shard

        share = shard(make_data(), seed=5)
        arguments = (share.batch(BATCH),)
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        # Its rate of each batch scales the momentum: a batch that is left out must not.
        hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=2),
    ]
    if name:
        store = hvd.CheckpointStore(SCRATCH / name, asynchronous=True)
        callbacks.append(hvd.callbacks.CheckpointCallback(store, 4, share, monitor="loss"))
    else:
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
        if share is not None:
            callbacks.append(
                keras.callbacks.LambdaCallback(
                    on_epoch_begin=lambda epoch, logs: share.set_epoch(epoch)
                )
            )
    watch = Watch(stop_at, interrupt)
    callbacks.append(watch)
    try:
        model.fit(*arguments, epochs=EPOCHS, verbose=0, callbacks=callbacks, **options)
    except InterruptedError:
        if name:
            store.close()
        return None
    history = {
        str(epoch): {
            key: float(values[index]).hex() for key, values in model.history.history.items()
        }
        for index, epoch in enumerate(model.history.epoch)
    }
    weights = [np.asarray(keras.ops.convert_to_numpy(v)).tobytes().hex() for v in model.weights]
    return watch.losses, history, weights


def tape(name=None, stop_at=None, interrupt=None):
    """Train in a loop of one's own, with augmentation by NumPy's generator."""
    import tensorflow as tf

    import hvdkit.tensorflow as hvd_tf

    keras.utils.clear_session()  # Keras's functions without a seed begin anew
    model = make_model()
    keras.utils.set_random_seed(50 + hvd.rank())
    tf.random.set_global_generator(tf.random.Generator.from_seed(hvd.rank()))
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.build(model.trainable_variables)
    share = hvd_tf.shard(make_data(), seed=5)
    passes = share.batch(BATCH)
    store = hvd.CheckpointStore(SCRATCH / name, asynchronous=True) if name else None
    step = 0
    if store is None:
        hvd.broadcast_initial_state(model, optimizer)
    elif saved := hvd.restore_or_broadcast(store, model, optimizer):
        step = saved["step"]
    losses = {}
    for epoch in range(step // STEPS, EPOCHS):
        share.set_epoch(epoch)
        for inputs, targets in passes.skip(step % STEPS):
            if step == stop_at:
                interrupt()
                store.close()
                return None
            inputs += np.random.normal(scale=0.1, size=inputs.shape)
            inputs *= random.choice([-1.0, 1.0])
            inputs += tf.random.get_global_generator().normal(inputs.shape, stddev=0.1)
            inputs += keras.random.normal(inputs.shape, stddev=0.1)
            with hvd_tf.DistributedGradientTape(tf.GradientTape()) as gradient_tape:
                loss = keras.ops.mean(keras.ops.square(model(inputs, training=True) - targets))
            gradients = gradient_tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            step += 1
            losses[str(step)] = float(loss).hex()
            if store and step % 4 == 0:
                store.save(step, model, optimizer, random=hvd.gather_random_state(model))
    if store:
        store.close()
    return losses, [np.asarray(v.numpy()).tobytes().hex() for v in model.weights]


def note(name, value):
    (SCRATCH / f"{name}-{hvd.rank()}.json").write_text(json.dumps(value))


def recall(name):
    return json.loads((SCRATCH / f"{name}-{hvd.rank()}.json").read_text())


KINDS = {"arrays": {}}
if is_tensorflow():
    KINDS |= {"dataset": {"kind": "dataset"}, "pairs": {"steps_per_execution": 2}}


def check_saving_changes_nothing():
    for kind, options in KINDS.items():
        whole = fit(**options)
        note(kind, whole)
        assert all(np.isfinite(float.fromhex(loss)) for loss in whole[0].values())
        assert len(whole[0]) == (6 if kind == "pairs" else STEPS) * EPOCHS
        assert set(whole[1]) == {"0", "1", "2"}
        assert fit(f"saving-{kind}", **options) == whole
    if is_tensorflow():
        whole = tape()
        note("tape", whole)
        assert tape("saving-tape") == whole
        everyones = allgather_object(whole[0], name="tests", process_set=hvd.global_process_set)
        assert everyones[0] != everyones[1]


def check_the_best_of_the_epochs_is_kept():
    scores = []
    for epoch in recall("arrays")[1].values():
        scores.append(float.fromhex(epoch["loss"]))
    if hvd.rank() == 0:
        store = hvd.CheckpointStore(SCRATCH / "saving-arrays")
        steps = [saved.step for saved in store.checkpoints()]
        assert steps == [26, 30, 33]  # of the last epoch, every 4 batches
        assert store.best().step == 33
        assert scores[2] == min(scores)


def check_runs_are_interrupted():
    for kind, options in KINDS.items():
        assert fit(kind, (1, 10 if kind == "pairs" else 9), interrupt, **options) is None
    # Every rank has to have stopped, since the directories are read again.
    if is_tensorflow():
        assert tape("tape", 21, lambda: None) is None


def check_other_data_and_options_are_refused():
    save = hvd.callbacks.CheckpointCallback(hvd.CheckpointStore(SCRATCH / "arrays"))
    model = make_model()
    inputs, targets = hvd.shard(make_data())
    with pytest.raises(HvdkitError, match="epoch 1 has ended within the 8 batches"):
        model.fit(inputs[:4], targets[:4], 2, 3, verbose=0, callbacks=[save], shuffle=False)
    assert save.restored == {"step": 19, "epoch": 1, "batch": 8}
    if is_tensorflow():
        model = make_model(steps_per_execution=3)
        with pytest.raises(HvdkitError, match=r"takes 3 batches at a time, to 9: set"):
            model.fit(inputs, targets, 2, 3, verbose=0, callbacks=[save], shuffle=False)
    foreign = hvd.CheckpointStore(SCRATCH / "foreign")
    foreign.save(1, model, model.optimizer)
    save = hvd.callbacks.CheckpointCallback(foreign)
    allgather_object(0, name="tests", process_set=hvd.global_process_set)
    with pytest.raises(HvdkitError, match="not saved by a CheckpointCallback"):
        model.fit(inputs, targets, 2, 3, verbose=0, callbacks=[save])


class Noting(hvd.CheckpointStore):
    """Notes the batches done and the position at each save."""

    saves = ()

    def save(self, step, model=None, optimizer=None, **options):
        calls = int(optimizer._iterations.numpy())
        self.saves += ((step, calls, options["fit"]["epoch"], options["fit"]["batch"]),)
        return super().save(step, model, optimizer, **options)


def check_saves_wait_until_accumulated_gradients_are_applied():
    model = make_model()
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3), "mse")
    store = Noting(SCRATCH / "accumulated")
    save = hvd.callbacks.CheckpointCallback(store, 4)
    inputs, targets = hvd.shard(make_data())
    model.fit(inputs, targets, BATCH, 2, verbose=0, callbacks=[save], shuffle=False)
    # Due after 4, 8 and 11 batches of an epoch; with two workers there are 22 batches in all.
    assert store.saves == ((6, 6, 0, 6), (12, 12, 1, 1), (18, 18, 1, 7))


def check_a_store_that_cannot_be_written_is_an_error_on_every_rank():
    if hvd.rank() == 0:
        (SCRATCH / "directory").mkdir()
    allgather_object(0, name="tests", process_set=hvd.global_process_set)
    store = hvd.CheckpointStore(SCRATCH / "directory", asynchronous=True)
    save = hvd.callbacks.CheckpointCallback(store, 4)
    inputs, targets = hvd.shard(make_data())

    def take_away(epoch, logs):
        if epoch == 1 and hvd.rank() == 0:
            store.wait()
            shutil.rmtree(store.directory)
            store.directory.write_text("a file")

    spoil = keras.callbacks.LambdaCallback(on_epoch_begin=take_away)
    with pytest.raises(HvdkitError, match=r"cannot write the checkpoint of step 15 .*not a file"):
        make_model().fit(inputs, targets, BATCH, 2, verbose=0, callbacks=[save, spoil])


def check_every_worker_is_killed():
    fit("killed", (1, 6), kill)
    raise AssertionError("it was to be killed")


def demand_rest(found, expected):
    """The batches that were trained on, and epochs that ended, are those of the whole run."""
    assert found[0]
    assert set(found[0]) < set(expected[0])
    assert found[0] == {key: expected[0][key] for key in found[0]}
    assert found[-1] == expected[-1]


def check_interrupted_runs_go_on_to_the_last_bit():
    for kind, options in {**KINDS, "killed": {}}.items():
        expected = recall("arrays" if kind == "killed" else kind)
        found = fit(kind, **options)
        first = next(iter(found[0]))
        # The checkpoint before, or the one before that if a kill came before it was written.
        assert first in {"killed": ("0 8", "1 0", "1 4"), "pairs": ("1 9",)}.get(kind, ("1 8",)), (
            first
        )
        demand_rest(found, expected)
        assert found[1] == {key: expected[1][key] for key in found[1]}  # metrics of whole epochs
    if is_tensorflow():
        found = tape("tape")
        assert next(iter(found[0])) == "21"
        demand_rest(found, recall("tape"))


def check_a_run_that_is_done_does_nothing():
    model = make_model()
    save = hvd.callbacks.CheckpointCallback(hvd.CheckpointStore(SCRATCH / "arrays"))
    inputs, targets = hvd.shard(make_data())
    model.fit(inputs, targets, BATCH, EPOCHS, verbose=0, callbacks=[save], shuffle=False)
    assert model.history.epoch == []
    assert save.restored == {"step": 33, "epoch": 3, "batch": 0}
    # Nothing of it is left for the next fit.
    model.fit(inputs, targets, BATCH, 1, verbose=0, shuffle=False)
    assert model.history.epoch == [0]


def check_three_workers_go_on_from_two():
    """Two have made 8 batches of the second epoch, 32 samples; three take 5, of 30."""
    watch = Watch()
    save = hvd.callbacks.CheckpointCallback(hvd.CheckpointStore(SCRATCH / "sizes"))
    inputs, targets = hvd.shard(make_data())
    make_model().fit(
        inputs, targets, BATCH, EPOCHS, verbose=0, callbacks=[save, watch], shuffle=False
    )
    assert save.restored == {"step": 19, "epoch": 1, "batch": 5}
    batches = -(-len(inputs) // BATCH)
    assert list(watch.losses) == [
        f"{epoch} {batch}" for epoch in (1, 2) for batch in range(5 if epoch == 1 else 0, batches)
    ]
    drawn = allgather_object(np.random.rand(), name="tests", process_set=hvd.global_process_set)
    assert len(set(drawn)) == hvd.size()


if __name__ == "__main__":
    run_checks(globals())
