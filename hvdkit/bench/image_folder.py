"""Images in a folder with one folder a class: what a benchmark reads as its input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError

__all__ = ["list_images", "load_image"]

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png"}


def list_images(
    folder: Path, rank: int, size: int, batch: int, classes: int
) -> list[tuple[Path, int]]:
    """Return this rank's share of FOLDER/CLASS/IMAGE with the numbers of the classes.

    Raises:
        HvdkitError: No folder, fewer images than a batch for each rank, or more classes than
            the model has.
    """
    if not folder.is_dir():
        raise HvdkitError(f"{folder} is no folder; --input takes one with CLASS/IMAGE in it")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(names) > classes:
        raise HvdkitError(f"{folder} holds {len(names)} classes, the model tells {classes} apart")
    samples = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if len(samples) < batch * size:
        raise HvdkitError(
            f"{folder} holds {len(samples)} images (CLASS/IMAGE, {', '.join(sorted(SUFFIXES))}); "
            f"a batch of {batch} for each of {size} workers needs {batch * size}"
        )
    return samples[rank::size]


def load_image(path: Path, height: int, width: int) -> Any:
    """Return an image as a numpy array, uint8, (height, width, 3)."""
    import numpy
    from PIL import Image

    with Image.open(path) as image:
        return numpy.array(image.convert("RGB").resize((width, height)))
