"""What callbacks do in fit on two ranks; on the backend that KERAS_BACKEND names."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import HvdkitError, ReplicaMismatchError
from hvdkit.keras.collectives import allgather_object
from tests.distributed.keras_training import (
    FEATURES,
    build_model,
    compile_model,
    fit,
    make_data,
    read_weights,
    take_part,
)
from tests.distributed.worker import run_checks


def _gather(obj):
    return allgather_object(obj, name="tests.gather", process_set=hvd.global_process_set)


class Script(keras.callbacks.Callback):
    """Writes this rank's numbers into the logs, as a metric of its own would."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = float(self.values[epoch])


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs, self.rates = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def _model(optimizer=None, seed=0, **options):
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    return compile_model(build_model(seed), hvd.DistributedOptimizer(optimizer), **options)


def check_variables_are_broadcast_before_the_first_batch():
    model = _model(keras.optimizers.Adam(0.01 * (1 + hvd.rank())), seed=hvd.rank())
    expected = read_weights(build_model(seed=1))
    at_start = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            at_start.append(read_weights(self.model))

    fit(
        model,
        make_data(3),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1), Look()],
    )
    for ours, theirs in zip(at_start[0], expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02)
    hvd.check_replicas(model, buffers=True)


def check_a_model_without_variables_is_broadcast_when_it_has_them():
    for batches in (1, 3):
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(3)])
        compile_model(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
        assert not model.built
        fit(
            model, make_data(batches), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        )
        hvd.check_replicas(model)
        versions = _gather([v.numpy().tolist() for v in model.optimizer.variables])
        assert versions[0] == versions[1]


def check_local_variables_are_not_broadcast():
    model = _model(seed=hvd.rank())
    before = model.layers[1].kernel.numpy()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=model.layers[1].kernel
    )
    callback.set_model(model)
    callback.on_train_begin()
    np.testing.assert_array_equal(model.layers[1].kernel.numpy(), before)
    kernels = _gather(model.layers[0].kernel.numpy())
    np.testing.assert_array_equal(kernels[0], kernels[1])
    model.optimizer.register_local_var(model.layers[1].kernel)
    hvd.check_replicas(model)


def check_metrics_are_averaged_by_samples():
    model = _model(keras.optimizers.SGD(0.0), metrics=["accuracy"])
    x, y = make_data(2)
    cut = 20  # of 32: the ranks hold 20 and 12 rows to train on, 8 and 24 to validate on
    mine = slice(0, cut) if hvd.rank() == 0 else slice(cut, None)
    held = slice(0, 8) if hvd.rank() == 0 else slice(8, None)
    for validation in ({}, {"validation_data": (x[held], y[held])}):
        # Equal steps on both ranks: 4 of 5 rows and 4 of 3.
        history = model.fit(
            x[mine],
            y[mine],
            batch_size=5 - 2 * hvd.rank(),
            verbose=0,
            callbacks=[hvd.callbacks.MetricAverageCallback()],
            **validation,
        ).history
        expected = model.evaluate(x, y, verbose=0, return_dict=True)
        names = ["loss", "accuracy"] + (["val_loss", "val_accuracy"] if validation else [])
        assert sorted(history) == sorted(names)
        for name in names:
            assert history[name][0] == pytest.approx(expected[name.removeprefix("val_")], abs=1e-5)


def check_metrics_of_a_custom_step_are_averaged_plainly():
    class Custom(keras.Sequential):
        def train_step(self, data):
            return {"distance": keras.ops.convert_to_tensor(float(hvd.rank()))}

    model = Custom([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    compile_model(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    assert fit(model, make_data(1), callbacks=callbacks).history["distance"] == [0.5]


def check_decisions_are_the_same_wherever_the_average_stands():
    # Rank 0 alone would stop after the third epoch, rank 1 never; the mean stops after the fourth.
    values = [[4, 1, 2, 3, 4, 5, 6, 7], [8, 7, 2, 4, 5, 6, 7, 1]][hvd.rank()]
    for position in (0, 1, 3):
        recorder = Recorder()
        others = [
            keras.callbacks.EarlyStopping(monitor="score", patience=3, mode="min"),
            keras.callbacks.ReduceLROnPlateau(monitor="score", patience=1, factor=0.5, mode="min"),
            recorder,
        ]
        others.insert(position, hvd.callbacks.MetricAverageCallback())
        model = _model(keras.optimizers.SGD(0.5))

        class Score(keras.metrics.Metric):
            """A metric that Keras itself puts into the logs."""

            def __init__(self):
                super().__init__(name="score")
                self.value = self.add_variable((), "zeros")

            def update_state(self, *args, **kwargs):
                pass

            def result(self):
                return self.value + 0.0

            def reset_state(self):
                pass

        score = Score()
        compile_model(model, model.optimizer, metrics=[score])

        class Set(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None, score=score):
                score.value.assign(float(values[epoch]))

        fit(model, make_data(1), epochs=8, callbacks=[*others, Set()])
        assert [log["score"] for log in recorder.logs] == [6.0, 4.0, 2.0, 3.5, 4.5, 5.5], position
        assert recorder.rates == [0.5, 0.5, 0.5, 0.25, 0.125, 0.0625], position
        hvd.check_replicas(model)


def check_what_callbacks_add_to_the_logs_is_averaged_too():
    recorder = Recorder()
    model = _model()
    callbacks = [Script([hvd.rank()]), hvd.callbacks.MetricAverageCallback(), recorder]
    fit(model, make_data(1), callbacks=callbacks)
    assert recorder.logs[0]["score"] == 0.5


def check_training_that_ends_on_one_rank_ends_on_all():
    class StopOnRankOne(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and hvd.rank() == 1:
                self.model.stop_training = True

    callbacks = [StopOnRankOne(), hvd.callbacks.MetricAverageCallback()]
    history = fit(_model(), make_data(1), epochs=5, callbacks=callbacks).history
    assert len(history["loss"]) == 2


class _Score(keras.metrics.Metric):
    """A metric that Keras itself puts into the logs: this rank's value of each epoch."""

    def __init__(self, values):
        super().__init__(name="score")
        self.value = self.add_variable((), "zeros")
        self.values = values

    def update_state(self, *args, **kwargs):
        pass

    def result(self):
        return self.value + 0.0

    def reset_state(self):
        pass


class _SetScore(keras.callbacks.Callback):
    def __init__(self, score):
        super().__init__()
        self.score = score

    def on_epoch_begin(self, epoch, logs=None):
        self.score.value.assign(float(self.score.values[epoch]))


def check_callbacks_that_steer_act_alike_without_averaged_metrics():
    values = [[4, 1, 2, 3, 4, 5, 6, 7], [8, 7, 2, 4, 5, 6, 7, 1]][hvd.rank()]
    recorder, score = Recorder(), _Score(values)
    model = _model(keras.optimizers.SGD(0.5), metrics=[score])
    callbacks = [
        keras.callbacks.EarlyStopping(monitor="score", patience=3, mode="min"),
        keras.callbacks.ReduceLROnPlateau(monitor="score", patience=1, factor=0.5, mode="min"),
        recorder,
        _SetScore(score),
    ]
    fit(model, make_data(1), epochs=8, callbacks=callbacks)
    # The means are those of the check above; the others see this rank's own numbers.
    assert [log["score"] for log in recorder.logs] == values[:6]
    assert recorder.rates == [0.5, 0.5, 0.5, 0.25, 0.125, 0.0625]
    assert [log["learning_rate"] for log in recorder.logs][1:] == recorder.rates[:5]
    hvd.check_replicas(model)


def check_a_nan_on_one_rank_terminates_all():
    batches = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            batches.append(batch)

    x, y = make_data(5)
    x = x.copy()
    rows = len(x) // 5
    x[2 * rows + rows - 1] = np.nan  # the last row of the third batch: the last rank's
    model = _model()
    fit(model, (x, y), callbacks=[Count(), keras.callbacks.TerminateOnNaN()])
    assert batches == [0, 1, 2]
    assert model.stop_training


def check_warm_up():
    steps, rates = 4, []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    model = _model(keras.optimizers.SGD(0.4))
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    history = fit(model, make_data(steps), epochs=3, callbacks=[warmup, Look()]).history
    np.testing.assert_allclose(rates[:8], [0.2 + 0.2 * (n + 1) / 8 for n in range(8)], rtol=1e-5)
    np.testing.assert_allclose(rates[8:], 0.4, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], [0.3, 0.4, 0.4], rtol=1e-5)


def check_schedule_and_momentum_correction():
    for correction in (True, False):
        model = _model(keras.optimizers.SGD(1.0, momentum=0.9))
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: 0.1**epoch, momentum_correction=correction
        )
        data = make_data(1)
        weights = [read_weights(model)]

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None, weights=weights):
                weights.append(read_weights(self.model))

        fit(model, data, epochs=3, callbacks=[schedule, Look()])
        # Reference: the same updates by hand, on the whole batch.
        reference = compile_model(build_model(), keras.optimizers.SGD(1.0))
        velocity, factor = [0.0] * 4, 0.1 if correction else 1.0
        for epoch in range(3):
            reference.set_weights(weights[epoch])
            fit(reference, data, whole=True)
            steps = [
                after - before
                for after, before in zip(read_weights(reference), weights[epoch], strict=True)
            ]
            velocity = [
                0.9 * v * (factor if epoch else 1.0) + 0.1**epoch * step
                for v, step in zip(velocity, steps, strict=True)
            ]
            for v, after, before in zip(velocity, weights[epoch + 1], weights[epoch], strict=True):
                np.testing.assert_allclose(after - before, v, atol=2e-6)


def check_warm_up_says_when_it_needs_the_steps_of_an_epoch():
    def rows():
        yield tuple(take_part(*make_data(1)))

    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4)
    with pytest.raises(HvdkitError, match="pass steps_per_epoch"):
        _model().fit(rows(), verbose=0, callbacks=[warmup])


def check_replicas_are_checked_every_n_steps():
    for steps in (2, 3, 4):
        model, seen = _model(), []

        class Break(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None, seen=seen):
                seen.append(batch)
                if batch == 2 and hvd.rank() == 1:
                    self.model.layers[1].bias.assign([1.0, 2.0, 3.0])

        callbacks = [Break(), hvd.callbacks.ReplicaCheckCallback(steps)]
        with pytest.raises(ReplicaMismatchError, match="bias"):
            fit(model, make_data(5), callbacks=callbacks)
        assert seen[-1] == steps, seen
    model = _model()
    fit(model, make_data(5), epochs=2, callbacks=hvd.callbacks.ReplicaCheckCallback(3))


def check_best_model_is_written_by_rank_zero_only():
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"rank{hvd.rank()}.keras")
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(path))
        fit(_model(), make_data(2), callbacks=[hvd.callbacks.MetricAverageCallback(), best])
        assert path.exists() == (hvd.rank() == 0)
    unnamed = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(HvdkitError, match="filepath"):
        fit(_model(), make_data(1), callbacks=[unnamed])


def check_rank_zero():
    first = hvd.rank() == 0
    writer = keras.callbacks.CSVLogger("unused.csv")
    assert hvd.rank_zero(2) == (2 if first else 0)
    assert hvd.rank_zero("auto") == ("auto" if first else 0)
    assert hvd.rank_zero([writer]) == ([writer] if first else [])
    assert (hvd.rank_zero(writer) is writer) == first
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, f"rank{hvd.rank()}.csv")
        fit(_model(), make_data(2), callbacks=[hvd.rank_zero(keras.callbacks.CSVLogger(path))])
        assert path.exists() == first
    for wrong in (keras.callbacks.EarlyStopping(), hvd.callbacks.MetricAverageCallback()):
        with pytest.raises(HvdkitError, match="every rank"):
            hvd.rank_zero([wrong])


if __name__ == "__main__":
    run_checks(globals())
