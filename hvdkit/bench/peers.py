"""The ways of reducing gradients that the benchmark compares, and how each wraps a model.

A candidate that speaks Horovod's vocabulary is a module in ``ADAPTERS``, loaded only in the
worker that measures it, so that no candidate pays for another's imports or threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["ADAPTERS", "CANDIDATES", "ENVIRONMENT", "TIMEOUT_S", "Trainee", "prepare"]

ADAPTERS = {"hvdkit": "hvdkit.torch", "horovod": "horovod.torch"}
CANDIDATES = (*ADAPTERS, "ddp", "single")

# Stock Horovod's C++ as it was before the edits that make it faster.
ENVIRONMENT = {"horovod": {"HOROVOD_FIXED_CYCLES": "1", "HOROVOD_SPIN_WAIT": "1"}}

# What a candidate trains: the (perhaps wrapped) model, and the (perhaps wrapped) optimizer.
Trainee = tuple["Callable[[Tensor], Tensor]", "Optimizer"]

LEARNING_RATE = 1e-3
# Candidates are suspended while another one runs; no collective may take that for a dead peer.
TIMEOUT_S = 3600


def prepare(
    candidate: str, model: nn.Module, *, rank: int, size: int, rendezvous: Path
) -> tuple[Trainee, Callable[[], None]]:
    """Make ``model`` train as ``candidate`` does.

    Collective: every rank must call, except for ``single``.

    Args:
        candidate: one of ``CANDIDATES``.
        model: with equal initial values on every rank.
        rank: of this process.
        size: number of processes.
        rendezvous: a file that does not exist yet, the same for all ranks (``ddp`` only).

    Returns:
        The model and the optimizer to train with, and a function that ends communication.
    """
    if candidate in ADAPTERS:
        return _prepare_horovod(importlib.import_module(ADAPTERS[candidate]), model)
    if candidate == "ddp":
        return _prepare_ddp(model, rank, size, rendezvous)
    if candidate == "single":
        return (model, _make_optimizer(model)), lambda: None
    raise ValueError(f"unknown candidate {candidate!r}; choose from {', '.join(CANDIDATES)}")


def _make_optimizer(model: nn.Module) -> Optimizer:
    from torch.optim import SGD

    return SGD(model.parameters(), lr=LEARNING_RATE)


def _prepare_horovod(hvd: Any, model: nn.Module) -> tuple[Trainee, Callable[[], None]]:
    hvd.init()
    named_parameters = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(_make_optimizer(model), named_parameters=named_parameters)
    return (model, optimizer), hvd.shutdown


def _prepare_ddp(
    model: nn.Module, rank: int, size: int, rendezvous: Path
) -> tuple[Trainee, Callable[[], None]]:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group(
        "gloo",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return (wrapped, _make_optimizer(model)), distributed.destroy_process_group
