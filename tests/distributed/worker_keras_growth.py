"""2,000 steps of ``fit`` trace nothing new and leave neither objects nor memory behind."""

import keras
import numpy as np

import hvdkit.keras as hvd
from tests.distributed.growth import STEPS, STEPS_PER_EPOCH, WARM_UP_EPOCHS, Growth
from tests.distributed.keras_training import CLASSES, FEATURES, ROWS, compile_model
from tests.distributed.worker import run_checks


class _Watch(keras.callbacks.Callback):
    """Starts to measure when the warm-up is over."""

    growth = None

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == WARM_UP_EPOCHS:
            self.growth, self.traces = Growth(), len(self.model.traced)


def check_fit():
    class Model(keras.Sequential):
        def train_step(self, *args):
            if keras.backend.backend() == "tensorflow":
                self.traced.append(1)
            return super().train_step(*args)

    keras.utils.set_random_seed(0)
    model = Model([keras.Input((FEATURES,)), keras.layers.Dense(64), keras.layers.Dense(CLASSES)])
    object.__setattr__(model, "traced", [])
    compile_model(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    rng = np.random.default_rng(hvd.rank())
    rows = ROWS * STEPS_PER_EPOCH - 3  # the last batch is smaller
    x, y = rng.standard_normal((rows, FEATURES)), rng.integers(0, CLASSES, rows)
    watch = _Watch()
    model.fit(
        x,
        y,
        batch_size=ROWS,
        epochs=STEPS // STEPS_PER_EPOCH,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.ReplicaCheckCallback(),
            watch,
        ],
    )
    watch.growth.demand_none()
    assert int(model.optimizer.iterations) == STEPS
    assert len(model.traced) == watch.traces
    hvd.check_replicas(model)


if __name__ == "__main__":
    run_checks(globals())
