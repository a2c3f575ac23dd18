"""Batches of images from a folder, read by PyTorch's DataLoader."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hvdkit.bench.catalog import Recipe
from hvdkit.bench.image_folder import list_images, load_image
from hvdkit.bench.models import MODELS
from hvdkit.bench.worker import Seat

__all__ = ["read_batches"]


class _Images(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, samples: list[tuple[Path, int]], sides: tuple[int, int]) -> None:
        self._samples, self._sides = samples, sides

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[index]
        pixels = torch.from_numpy(load_image(path, *self._sides))
        return pixels.permute(2, 0, 1).float().div_(255), label


def read_batches(recipe: Recipe, seat: Seat, device: torch.device) -> Iterator[Any]:
    """Yield this rank's batches without end, one worker process reading ahead.

    Raises:
        HvdkitError: The folder holds too few images for a batch of each rank.
    """
    model = MODELS[recipe.model]
    assert recipe.input is not None
    samples = list_images(Path(recipe.input), seat.rank, seat.size, recipe.batch, model.classes)
    height, width, _ = model.shape
    loader = DataLoader(
        _Images(samples, (height, width)),
        recipe.batch,
        shuffle=True,
        drop_last=True,
        num_workers=1,
        persistent_workers=True,
        worker_init_fn=functools.partial(_set_threads, recipe.threads),
    )
    dtype = getattr(torch, recipe.dtype)
    while True:
        for inputs, labels in loader:
            yield inputs.to(device, dtype), labels.to(device)


def _set_threads(threads: int, worker: int) -> None:
    torch.set_num_threads(threads)
