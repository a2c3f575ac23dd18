"""ResNet-50, so that the example beside it needs no torchvision."""

from torch import Tensor, nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut.

    Source: He et al., Deep Residual Learning for Image Recognition (2015), with the stride on
    the 3 x 3 convolution as in Goyal et al., Accurate, Large Minibatch SGD (2017).
    """

    def __init__(self, channels: int, width: int, stride: int):
        """Map ``channels`` to 4 x ``width`` channels, at 1 / ``stride`` of the resolution."""
        super().__init__()
        outputs = EXPANSION * width
        self.body = nn.Sequential(
            *convolve(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolve(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolve(width, outputs, 1),
        )
        # Starting as the identity lets large batches train from the first steps on (Goyal et al.).
        nn.init.zeros_(self.body[-1].weight)
        keeps_shape = stride == 1 and channels == outputs
        shortcut = () if keeps_shape else convolve(channels, outputs, 1, stride)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, images: Tensor) -> Tensor:
        """Return the activations of this block."""
        return nn.functional.relu(self.body(images) + self.shortcut(images), inplace=True)


class ResNet50(nn.Sequential):
    """Maps images (float32, batch x 3 x height x width) to scores (batch x classes)."""

    def __init__(self, classes: int = 1000):
        """Make the four stages; 25.6 M parameters for 1000 classes."""
        blocks: list[nn.Module] = []
        channels = 64
        for stage, (width, count) in enumerate(STAGES):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = EXPANSION * width
        super().__init__(
            *convolve(3, 64, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, classes),
        )


def convolve(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution without bias and its batch norm."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(outputs)
