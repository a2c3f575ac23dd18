"""The benchmarks' models in Keras 3, layer for layer those of ``torch_models``.

Images are laid out as ``keras.config.image_data_format()`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from hvdkit.bench.models import MODELS

__all__ = ["build"]


def build(name: str) -> Any:
    """Return a new model, one of ``MODELS``, in the dtype of Keras's global policy."""
    model = MODELS[name]
    shape: tuple[int, ...] = model.shape
    if model.kind == "images" and keras.config.image_data_format() == "channels_first":
        shape = (shape[2], *shape[:2])
    inputs = keras.Input(shape, dtype="int32" if model.kind == "tokens" else None)
    return keras.Model(inputs, _BUILDERS[name](inputs, model.classes), name=name.replace("-", "_"))


def _build_mlp(x: Any, classes: int) -> Any:
    for _ in range(8):
        x = layers.ReLU()(layers.Dense(x.shape[-1])(x))
    return layers.Dense(classes)(x)


def _build_many_small(x: Any, classes: int) -> Any:
    for _ in range(100):
        x = layers.ReLU()(layers.LayerNormalization()(layers.Dense(x.shape[-1])(x)))
    return layers.Dense(classes)(x)


def _build_cnn(x: Any, classes: int) -> Any:
    for width, stride in [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]:
        x = layers.Conv2D(width, 3, strides=stride, padding="same")(x)
        x = layers.ReLU()(_normalize(x))
    return layers.Dense(classes)(layers.GlobalAveragePooling2D()(x))


def _build_vgg16(x: Any, classes: int) -> Any:
    for width, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(count):
            x = layers.ReLU()(layers.Conv2D(width, 3, padding="same")(x))
        x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.ReLU()(layers.Dense(4096)(x)))
    return layers.Dense(classes)(x)


def _build_resnet50(x: Any, classes: int) -> Any:
    x = layers.ReLU()(_convolve(x, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for width, count, first_stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for block in range(count):
            stride = first_stride if block == 0 else 1
            y = layers.ReLU()(_convolve(x, width, 1))
            y = layers.ReLU()(_convolve(y, width, 3, stride))
            y = _convolve(y, 4 * width, 1)
            # The first block of each stage changes the shape.
            x = layers.ReLU()(
                layers.add([y, _convolve(x, 4 * width, 1, stride) if not block else x])
            )
    return layers.Dense(classes)(layers.GlobalAveragePooling2D()(x))


def _convolve(x: Any, width: int, size: int, stride: int = 1) -> Any:
    x = layers.Conv2D(width, size, strides=stride, padding="same", use_bias=False)(x)
    return _normalize(x)


def _normalize(x: Any) -> Any:
    axis = 1 if keras.config.image_data_format() == "channels_first" else -1
    return layers.BatchNormalization(axis)(x)


class _Positions(layers.Layer):
    """Adds a learned vector to each place of a sequence."""

    def build(self, input_shape: Any) -> None:
        """Make the vectors, one for each place."""
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal")

    def call(self, hidden: Any) -> Any:
        """Return (batch, length, width), as it came."""
        return hidden + self.vectors


def _build_transformer(x: Any, classes: int) -> Any:
    width, heads = 256, 8
    hidden = _Positions()(layers.Embedding(classes, width)(x))
    for _ in range(4):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(heads, width // heads)
        hidden = layers.add([hidden, attention(normed, normed, use_causal_mask=True)])
        normed = layers.LayerNormalization()(hidden)
        wide = layers.Dense(4 * width, activation="gelu")(normed)
        hidden = layers.add([hidden, layers.Dense(width)(wide)])
    return layers.Dense(classes)(layers.LayerNormalization()(hidden))


_BUILDERS: dict[str, Callable[[Any, int], Any]] = {
    "mlp": _build_mlp,
    "many-small": _build_many_small,
    "cnn": _build_cnn,
    "resnet50": _build_resnet50,
    "vgg16": _build_vgg16,
    "transformer": _build_transformer,
}
