"""Images for the ResNet-50 example: a folder with one folder a class, or none at all."""

from pathlib import Path

import click
import torch
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class SyntheticImages(Dataset):
    """Noise around a colour that tells the class: no files needed, and something to learn."""

    def __init__(self, length: int, size: int, classes: int):
        """Make ``length`` images of ``size`` x ``size`` pixels."""
        self.length, self.size, self.classes = length, size, classes
        self.colours = torch.randn(classes, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Return the number of images."""
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return image (float32, 3 x size x size) and class; the same for the same index."""
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(3, self.size, self.size, generator=generator)
        label = index % self.classes
        return noise + self.colours[label].view(3, 1, 1), label


class ImageFolder(Dataset):
    """FOLDER/CLASS/IMAGE, decoded with Pillow; classes are numbered in alphabetical order."""

    def __init__(self, folder: Path, size: int, augment: bool):
        """List the images; ``augment`` crops and flips them at random."""
        from PIL import Image

        self.open, self.size, self.augment = Image.open, size, augment
        self.classes = sorted(path.name for path in folder.glob("*") if path.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.samples:
            raise click.ClickException(f"found no CLASS/IMAGE in {folder}")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return image (float32, 3 x size x size, normalised) and class."""
        path, label = self.samples[index]
        with self.open(path) as image:
            image = image.convert("RGB")
            # The shorter side to a little more than needed, then a square out of it.
            scale = self.size * 1.15 / min(image.size)
            image = image.resize([max(self.size, round(side * scale)) for side in image.size])
            where = torch.rand(2) if self.augment else torch.full((2,), 0.5)
            left, top = (
                int(share * (side - self.size))
                for share, side in zip(where.tolist(), image.size, strict=True)
            )
            image = image.crop((left, top, left + self.size, top + self.size))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1) / 255
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(SPREAD).view(
            3, 1, 1
        ), label
