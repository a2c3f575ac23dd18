"""The models of the benchmarks: one description, built in each framework from the same layers.

``torch_models`` and ``keras_models`` build them; this module imports neither framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """What a model takes and how large it is.

    Attributes:
        kind: What a sample is. Vectors and images hold floats; tokens are integers below
            ``classes``, and the model predicts one class a token.
        shape: Of a sample; images as (height, width, channels).
        classes: That the model tells apart.
        batch: Samples a worker takes at a time, unless told otherwise.
        parameters: Elements of the trainable tensors.
        tensors: Number of the trainable tensors.
        description: One line for people.
    """

    kind: Literal["vectors", "images", "tokens"]
    shape: tuple[int, ...]
    classes: int
    batch: int
    parameters: int
    tensors: int
    description: str


# They cost a data-parallel optimizer in different places. Batches suit one core a worker.
MODELS = {
    "mlp": Model("vectors", (1024,), 10, 32, 8_407_050, 18, "few large tensors: bandwidth"),
    "many-small": Model(
        "vectors", (64,), 10, 128, 429_450, 402, "many small tensors: work a tensor"
    ),
    "cnn": Model("images", (32, 32, 3), 10, 32, 1_167_434, 30, "convolutions: computing"),
    "resnet50": Model("images", (224, 224, 3), 1000, 8, 25_557_032, 161, "ResNet-50 for ImageNet"),
    "vgg16": Model("images", (224, 224, 3), 1000, 2, 138_357_544, 32, "VGG-16 for ImageNet"),
    "transformer": Model("tokens", (128,), 256, 8, 3_323_648, 70, "a decoder over bytes"),
}
