"""Batches of images from a folder, read by ``tf.data``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdkit.bench.catalog import Recipe
from hvdkit.bench.image_folder import list_images
from hvdkit.bench.models import MODELS
from hvdkit.bench.worker import Seat

__all__ = ["read_batches"]


def read_batches(recipe: Recipe, seat: Seat) -> Iterator[Any]:
    """Yield this rank's batches without end, read ahead by one thread.

    Raises:
        HvdkitError: The folder holds too few images for a batch of each rank.
    """
    model = MODELS[recipe.model]
    assert recipe.input is not None
    samples = list_images(Path(recipe.input), seat.rank, seat.size, recipe.batch, model.classes)

    def load(path: Any, label: Any) -> tuple[Any, Any]:
        pixels = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        image = tf.image.resize(pixels, model.shape[:2]) / 255
        return tf.cast(tf.ensure_shape(image, model.shape), recipe.dtype), label

    paths, labels = zip(*((str(path), label) for path, label in samples), strict=True)
    options = tf.data.Options()
    options.threading.private_threadpool_size = recipe.threads
    dataset = tf.data.Dataset.from_tensor_slices((list(paths), tf.constant(labels, tf.int32)))
    dataset = dataset.shuffle(len(samples), seed=0).map(load).batch(recipe.batch, True)
    return iter(dataset.repeat().prefetch(2).with_options(options))
