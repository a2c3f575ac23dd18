"""Keras 3 on either backend: ``fit`` where a candidate can, a loop on the same model elsewhere."""

from __future__ import annotations

import importlib
import itertools
import os
import time
from typing import Any

from hvdkit.bench.catalog import LEARNING_RATE, Recipe, Training
from hvdkit.bench.worker import Seat

__all__ = ["prepare"]

ADAPTER = "hvdkit.keras"


def prepare(recipe: Recipe, seat: Seat) -> Training:
    """See ``hvdkit.bench.catalog.prepare``."""
    if recipe.framework == "keras-torch":
        os.environ["KERAS_BACKEND"] = "torch"
        return _prepare_on_torch(recipe, seat)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    return _prepare_on_tensorflow(recipe, seat)


def _prepare_on_tensorflow(recipe: Recipe, seat: Seat) -> Training:
    import tensorflow as tf

    from hvdkit.bench.tensorflow_training import make_batch, prepare_loop, set_up

    set_up(recipe, seat)
    if recipe.candidate not in ("hvdkit", "single"):
        return prepare_loop(recipe, seat)
    batches = tf.data.Dataset.from_tensors(make_batch(recipe)).cache().repeat()
    return _prepare_fit(recipe, batches)


def _prepare_on_torch(recipe: Recipe, seat: Seat) -> Training:
    import keras
    import torch

    from hvdkit.bench.models.keras_models import build
    from hvdkit.bench.torch_training import make_batch, pick_device, prepare_loop

    # As PyTorch has them; otherwise each convolution turns its images around.
    keras.config.set_image_data_format("channels_first")
    keras.config.set_dtype_policy(recipe.dtype)
    keras.utils.set_random_seed(0)
    if recipe.candidate not in ("hvdkit", "single"):
        return prepare_loop(build(recipe.model), recipe, seat)
    torch.set_num_threads(recipe.threads)
    batch = make_batch(recipe, pick_device(seat))
    return _prepare_fit(recipe, (one for one in itertools.repeat(batch)))


def _prepare_fit(recipe: Recipe, batches: Any) -> Training:
    import keras

    from hvdkit.bench.models.keras_models import build

    # A limit for hvdkit updates as seldom as hvdkit does.
    alone = recipe.candidate == "single" and recipe.accumulate > 1
    optimizer = keras.optimizers.SGD(
        LEARNING_RATE, gradient_accumulation_steps=recipe.accumulate if alone else None
    )
    close: Any = lambda: None  # noqa: E731
    if recipe.candidate == "hvdkit":
        hvd = importlib.import_module(ADAPTER)
        hvd.init()
        size = {} if recipe.bucket_size_mb is None else {"bucket_size_mb": recipe.bucket_size_mb}
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            compression=getattr(hvd.Compression, recipe.compression),
            backward_passes_per_step=recipe.accumulate,
            **size,
        )
        close = hvd.shutdown
    net = build(recipe.model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA would be chosen for "single" only: Horovod's operations cannot be compiled.
    net.compile(optimizer, loss, jit_compile=False)

    class Clock(keras.callbacks.Callback):
        """Notes when each pass of ``fit`` ends."""

        def __init__(self) -> None:
            super().__init__()
            self.ends_s: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Note the time."""
            self.ends_s.append(time.perf_counter())

    def fit(steps: int) -> dict[str, list[float]]:
        clock = Clock()
        # One more than asked for, at whose end the first begins.
        passes = recipe.accumulate * (steps + 1)
        net.fit(batches, steps_per_epoch=passes, epochs=1, verbose=0, callbacks=[clock])
        ends_s = clock.ends_s[recipe.accumulate - 1 :: recipe.accumulate]
        return {"step_s": [end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)]}

    return Training(run=fit, close=close)
