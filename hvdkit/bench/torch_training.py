"""The PyTorch models that optimizers are timed on, and how each candidate trains them.

Batches are such that computing alone takes some 40, 10 and 70 ms on one core of a server
processor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdkit.bench.catalog import TIMEOUT_S, Training
from hvdkit.bench.timing import time_steps

__all__ = ["prepare"]

CLASSES = 10
LEARNING_RATE = 1e-3
ADAPTERS = {"hvdkit": "hvdkit.torch", "horovod": "horovod.torch"}


def prepare(
    candidate: str, model: str, *, rank: int, size: int, threads: int, folder: Path
) -> Training:
    """See ``hvdkit.bench.catalog.prepare``."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    net, inputs = _MODELS[model]()
    labels = torch.randint(CLASSES, (len(inputs),))
    sizes = [parameter.numel() for parameter in net.parameters()]
    forward, optimizer, close = _distribute(candidate, net, rank, size, folder)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(forward(inputs), labels).backward()
        optimizer.step()

    return Training(
        run=lambda steps: time_steps(step, steps),
        close=close,
        batch=len(inputs),
        tensors=len(sizes),
        parameters=sum(sizes),
    )


def _distribute(
    candidate: str, net: nn.Module, rank: int, size: int, folder: Path
) -> tuple[Callable[[Any], Any], Any, Callable[[], None]]:
    """Return the (perhaps wrapped) model and optimizer, and what ends communication."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    if candidate in ADAPTERS:
        hvd = importlib.import_module(ADAPTERS[candidate])
        hvd.init()
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
        return net, wrapped, hvd.shutdown
    if candidate == "ddp":
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        distributed.init_process_group(
            "gloo",
            init_method=(folder / "rendezvous").as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        parallel = DistributedDataParallel(net, gradient_as_bucket_view=True)
        return parallel, optimizer, distributed.destroy_process_group
    return net, optimizer, lambda: None


def _make_mlp() -> tuple[nn.Module, torch.Tensor]:
    """8.4 M parameters in 18 tensors."""
    width = 1024
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), torch.randn(64, width)


def _make_many_small() -> tuple[nn.Module, torch.Tensor]:
    """0.43 M parameters in 402 tensors; layer norms keep 100 layers well scaled."""
    width = 64
    layers: list[nn.Module] = []
    for _ in range(100):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), torch.randn(128, width)


def _make_cnn() -> tuple[nn.Module, torch.Tensor]:
    """1.2 M parameters in 30 tensors, on 32 x 32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in [(32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]:
        convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return nn.Sequential(*layers, *head), torch.randn(32, 3, 32, 32)


_MODELS = {"mlp": _make_mlp, "many-small": _make_many_small, "cnn": _make_cnn}
