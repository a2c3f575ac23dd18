"""Two ways to train a small model: on this rank's part of each batch, and on all of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import hvdkit.torch as hvd

ROWS = 6  # of each rank in each batch
FEATURES, CLASSES = 5, 3

Batch = tuple[torch.Tensor, torch.Tensor]

# The parent repeats checks with buckets so small that every gradient travels alone.
if bucket_size_mb := os.environ.get("HVDKIT_TEST_BUCKET_SIZE_MB"):
    hvd.DistributedOptimizer.__kwdefaults__["bucket_size_mb"] = float(bucket_size_mb)


def build_model(seed: int = 0) -> torch.nn.Module:
    """Layers of several sizes, the middle one large enough to be written ahead of its bucket."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 190),
        torch.nn.Tanh(),
        torch.nn.Linear(190, 180),
        torch.nn.Tanh(),
        torch.nn.Linear(180, CLASSES),
    )


def make_batches(count: int, seed: int = 1, rows: int = ROWS) -> list[Batch]:
    """Whole batches, the same on every rank: ``rows`` times the number of ranks each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows * hvd.size(), FEATURES, generator=generator),
            torch.randint(0, CLASSES, (rows * hvd.size(),), generator=generator),
        )
        for _ in range(count)
    ]


def take_part(batch: Batch) -> Batch:
    """Return the rows of a whole batch that are this rank's."""
    rows = len(batch[0]) // hvd.size()
    start = hvd.rank() * rows
    return batch[0][start : start + rows], batch[1][start : start + rows]


def compute_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy, computed in float32 whatever the model's dtype."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return torch.nn.functional.cross_entropy(model(batch[0].to(dtype)).float(), batch[1])


def take_steps(
    model: torch.nn.Module,
    optimizer: Any,
    batches: list[Batch],
    *,
    passes: int = 1,
    factor: float = 1.0,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Train: ``passes`` backward passes a step, ``between`` them and the step."""
    for first in range(0, len(batches), passes):
        optimizer.zero_grad()
        for batch in batches[first : first + passes]:
            (compute_loss(model, batch) * factor).backward()
        between()
        optimizer.step()


def assert_equal_models(
    model: torch.nn.Module, reference: torch.nn.Module, atol: float = 2e-6, rtol: float = 1e-5
) -> None:
    """Compare all parameters with the reference's, and bit for bit with the other ranks'."""
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param, theirs[name], atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert_equal_replicas(model)


def assert_equal_replicas(model: torch.nn.Module) -> None:
    """Compare all parameters bit for bit with rank 0's, by way of stock Horovod operations."""
    flat = torch.cat([param.detach().double().flatten() for param in model.parameters()])
    root = hvd.broadcast(flat, root_rank=0, name="tests.replicas")
    assert torch.equal(flat, root), f"replicas differ by {(flat - root).abs().max()}"
