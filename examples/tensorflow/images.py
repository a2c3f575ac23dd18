"""Images for the ResNet-50 example: a folder with one folder a class, or none at all."""

from pathlib import Path

import numpy as np
import tensorflow as tf

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif"}
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def list_synthetic(length: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and classes: no files needed, and something to learn."""
    indices = np.arange(length)
    return indices, indices % classes


def make_image(index: tf.Tensor, label: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return noise around a colour that tells the class; the same for the same index."""
    colour = tf.random.stateless_normal((3,), (label, 0))
    return tf.random.stateless_normal((size, size, 3), (index, 1)) + colour, label


def list_folder(folder: Path) -> tuple[tuple[np.ndarray, np.ndarray], list[str]]:
    """Return paths and classes of FOLDER/CLASS/IMAGE, and the classes in alphabetical order."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    samples = [
        (str(path), label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    paths, labels = [path for path, _ in samples], [label for _, label in samples]
    return (np.array(paths, str), np.array(labels, int)), classes


def read_image(
    path: tf.Tensor, label: tf.Tensor, size: int, augment: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return image (float32, size x size x 3, normalised) and class; ``augment`` crops and flips.

    The shorter side becomes a little more than needed, then a square is cut out of it.
    """
    image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
    sides = tf.cast(tf.shape(image)[:2], tf.float32)
    sides = tf.cast(tf.round(sides * size * 1.15 / tf.reduce_min(sides)), tf.int32)
    image = tf.image.resize(image, tf.maximum(sides, size)) / 255
    if augment:
        image = tf.image.random_flip_left_right(tf.image.random_crop(image, (size, size, 3)))
    else:
        top, left = tf.unstack((tf.shape(image)[:2] - size) // 2)
        image = image[top : top + size, left : left + size]
    image = tf.ensure_shape(image, (size, size, 3))
    return (image - tf.constant(MEAN)) / tf.constant(SPREAD), label
