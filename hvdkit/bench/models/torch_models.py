"""The benchmarks' models in PyTorch; images are (batch, channels, height, width)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from hvdkit.bench.models import MODELS

__all__ = ["build"]


def build(name: str) -> nn.Module:
    """Return a new model, one of ``MODELS``, in float32 on the CPU."""
    return _BUILDERS[name](MODELS[name].classes)


def _build_mlp(classes: int) -> nn.Module:
    (width,) = MODELS["mlp"].shape
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def _build_many_small(classes: int) -> nn.Module:
    """Layer norms keep 100 layers well scaled."""
    (width,) = MODELS["many-small"].shape
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def _build_cnn(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]:
        convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def _build_vgg16(classes: int) -> nn.Module:
    """Configuration D of Simonyan and Zisserman, arXiv:1409.1556 (2014)."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inputs in (7 * 7 * channels, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


def _build_resnet50(classes: int) -> nn.Module:
    """He et al., arXiv:1512.03385 (2015); the stride is on the 3 x 3 convolution."""
    layers: list[nn.Module] = [*_convolve(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, count, first_stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for block in range(count):
            layers.append(_Bottleneck(channels, width, first_stride if block == 0 else 1))
            channels = 4 * width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def _convolve(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolve(channels, width, 1),
            nn.ReLU(),
            *_convolve(width, width, 3, stride),
            nn.ReLU(),
            *_convolve(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Sequential(*([] if same else _convolve(channels, 4 * width, 1, stride)))

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


def _build_transformer(classes: int) -> nn.Module:
    return _Transformer(length=MODELS["transformer"].shape[0], classes=classes, width=256, blocks=4)


class _Transformer(nn.Module):
    """A decoder with norms before each part, as GPT-2 has them (Radford et al., 2019)."""

    def __init__(self, length: int, classes: int, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads=8) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        scores: Tensor = self.output(self.norm(self.blocks(hidden)))
        return scores


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.join = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        batch, length, width = normed.shape
        query, key, value = (
            part(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.mlp_norm(hidden))


_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": _build_mlp,
    "many-small": _build_many_small,
    "cnn": _build_cnn,
    "resnet50": _build_resnet50,
    "vgg16": _build_vgg16,
    "transformer": _build_transformer,
}
