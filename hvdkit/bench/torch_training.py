"""Training steps in PyTorch, and how each candidate reduces gradients there."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdkit.bench.catalog import LEARNING_RATE, Recipe, Training
from hvdkit.bench.crew import TIMEOUT_S
from hvdkit.bench.models import MODELS
from hvdkit.bench.models.torch_models import build
from hvdkit.bench.timing import Feed, time_steps
from hvdkit.bench.worker import Seat

__all__ = ["Distributed", "distribute", "make_batch", "pick_device", "prepare", "prepare_loop"]

ADAPTERS = {"hvdkit": "hvdkit.torch", "horovod": "horovod.torch"}


@dataclass(frozen=True)
class Distributed:
    """What a candidate makes of a model.

    Attributes:
        forward: The model, or what the candidate wrapped around it.
        optimizer: The same of its optimizer.
        hold_back: Returns a context manager in which backward passes do not communicate.
        close: Ends communication.
    """

    forward: Callable[[Any], Any]
    optimizer: Any
    hold_back: Callable[[], Any]
    close: Callable[[], None]


def prepare(recipe: Recipe, seat: Seat) -> Training:
    """See ``hvdkit.bench.catalog.prepare``."""
    torch.manual_seed(0)
    net = build(recipe.model).to(pick_device(seat), getattr(torch, recipe.dtype))
    return prepare_loop(net, recipe, seat)


def prepare_loop(net: nn.Module, recipe: Recipe, seat: Seat) -> Training:
    """Make a loop of one's own over ``net``, as a candidate would have it."""
    torch.set_num_threads(recipe.threads)
    device = pick_device(seat)
    distributed = distribute(net, recipe, seat)
    if recipe.input is None:
        feed = Feed(itertools.repeat(make_batch(recipe, device)))
    else:
        from hvdkit.bench.torch_input import read_batches

        feed = Feed(read_batches(recipe, seat, device))

    def step() -> None:
        distributed.optimizer.zero_grad()
        for remaining in reversed(range(recipe.accumulate)):
            inputs, labels = feed.draw()
            with distributed.hold_back() if remaining else contextlib.nullcontext():
                scores = distributed.forward(inputs)
                functional.cross_entropy(scores.flatten(0, -2), labels.flatten()).backward()
        distributed.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def describe() -> dict[str, Any]:
        if device.type != "cuda":
            return {}
        return {"device_peak_bytes": torch.cuda.max_memory_allocated(device)}

    return Training(
        run=lambda steps: time_steps(step, steps, feed if recipe.input else None),
        close=distributed.close,
        describe=describe,
    )


def pick_device(seat: Seat) -> torch.device:
    """Return the GPU of this worker, or the CPU where torch sees none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(seat.local_rank)
    return torch.device("cuda", seat.local_rank)


def make_batch(recipe: Recipe, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and labels of the shapes that the model takes."""
    model = MODELS[recipe.model]
    if model.kind == "tokens":
        tokens = torch.randint(model.classes, (2, recipe.batch, *model.shape), device=device)
        return tokens[0], tokens[1]
    shape = model.shape
    if model.kind == "images":
        shape = (shape[2], *shape[:2])
    dtype = getattr(torch, recipe.dtype)
    inputs = torch.randn(recipe.batch, *shape, device=device).to(dtype)
    return inputs, torch.randint(model.classes, (recipe.batch,), device=device)


def distribute(net: nn.Module, recipe: Recipe, seat: Seat) -> Distributed:
    """Wrap the model and an optimizer for it as the recipe's candidate does."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    if recipe.candidate in ADAPTERS:
        return _distribute_by_horovod(net, optimizer, recipe)
    if recipe.candidate == "ddp":
        return _distribute_by_ddp(net, optimizer, recipe, seat)
    # A limit for hvdkit must have all that hvdkit has but communication.
    importlib.import_module(ADAPTERS["hvdkit"]).startup.keep_freed_memory()
    return Distributed(net, optimizer, contextlib.nullcontext, lambda: None)


def _distribute_by_horovod(net: nn.Module, optimizer: Any, recipe: Recipe) -> Distributed:
    hvd = importlib.import_module(ADAPTERS[recipe.candidate])
    hvd.init()
    options: dict[str, Any] = {}
    if recipe.candidate == "hvdkit" and recipe.bucket_size_mb is not None:
        options["bucket_size_mb"] = recipe.bucket_size_mb
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=getattr(hvd.Compression, recipe.compression),
        backward_passes_per_step=recipe.accumulate,
        **options,
    )
    # Both count the passes themselves.
    return Distributed(net, optimizer, contextlib.nullcontext, hvd.shutdown)


def _distribute_by_ddp(net: nn.Module, optimizer: Any, recipe: Recipe, seat: Seat) -> Distributed:
    from torch import distributed
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{seat.addresses[0]}",
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    size: dict[str, Any] = (
        {} if recipe.bucket_size_mb is None else {"bucket_cap_mb": recipe.bucket_size_mb}
    )
    parallel = DistributedDataParallel(net, gradient_as_bucket_view=True, **size)
    if recipe.compression != "none":
        hook = getattr(default_hooks, f"{recipe.compression}_compress_hook")
        parallel.register_comm_hook(None, hook)
    return Distributed(parallel, optimizer, parallel.no_sync, distributed.destroy_process_group)
