"""The models that optimizers are timed on, each with one fixed random batch.

Three shapes that cost a data-parallel optimizer in different places: a few large tensors
(bandwidth), many small ones (work per tensor), and a convolutional net (compute).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["WORKLOADS", "Workload"]

CLASSES = 10


@dataclass
class Workload:
    """A classifier and the batch that it is trained on; ``inputs`` float32, ``labels`` int64."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor

    def compute_loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mean cross-entropy of ``model`` (this one, perhaps wrapped) on the batch."""
        from torch.nn import functional

        return functional.cross_entropy(model(self.inputs), self.labels)

    def count_parameters(self) -> tuple[int, int]:
        """Return the number of parameter tensors and of their elements."""
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        return len(sizes), sum(sizes)


def _make_batch(model: nn.Module, batch: int, *shape: int) -> Workload:
    import torch

    return Workload(model, torch.randn(batch, *shape), torch.randint(CLASSES, (batch,)))


def _make_mlp() -> Workload:
    """8.4 M parameters in 18 tensors."""
    from torch import nn

    width = 1024
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return _make_batch(nn.Sequential(*layers, nn.Linear(width, CLASSES)), 64, width)


def _make_many_small() -> Workload:
    """0.43 M parameters in 402 tensors; layer norms keep 100 layers well scaled."""
    from torch import nn

    width = 64
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
    return _make_batch(nn.Sequential(*layers, nn.Linear(width, CLASSES)), 128, width)


def _make_cnn() -> Workload:
    """1.2 M parameters in 30 tensors, on 32 x 32 images."""
    from torch import nn

    layers: list[nn.Module] = []
    channels = 3
    for width, stride in [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]:
        convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return _make_batch(nn.Sequential(*layers, *head), 32, 3, 32, 32)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": _make_mlp,
    "many-small": _make_many_small,
    "cnn": _make_cnn,
}
