"""What a replica holds in PyTorch: counted from tensors, and the peak of a step as allocated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdkit.bench.memory import Settings
from hvdkit.bench.memory_worker import load
from hvdkit.bench.models import MODELS
from hvdkit.bench.models.torch_models import build
from hvdkit.tuning import FUSION_THRESHOLD_BYTES

__all__ = ["count"]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def count(settings: Settings) -> dict[str, Any]:
    """Return what ``hvdkit.bench.memory.make_replica`` takes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = ":" in settings.model
    model = (load(settings.model)() if own else build(settings.model)).to(device)
    take_loss = None if settings.loss is None else load(settings.loss)
    make = load(settings.optimizer) if ":" in settings.optimizer else OPTIMIZERS[settings.optimizer]
    optimizer = make(model.parameters())
    batch = settings.batch
    assert batch is not None

    def forward(samples: int) -> Any:
        if take_loss is None:
            return _take_loss(model, samples, settings.model, device)
        return take_loss(model, samples)

    def step(samples: int) -> None:
        # Gradients stay where they are, as with hvdkit, and are written anew.
        optimizer.zero_grad(set_to_none=False)
        forward(samples).backward()
        optimizer.step()

    step(batch)  # makes gradients and state
    few = max(1, batch // 2)
    peaks = [
        [samples, _measure_peak(step, samples, device)]
        for samples in ((few, batch) if few < batch else (batch, 2 * batch))
    ]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    state = [
        value
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    ]
    lasting = _count_bytes([*model.parameters(), *model.buffers()])
    parameters = _count_bytes(model.parameters())
    return {
        "parameters": parameters,
        "buffers": lasting - parameters,
        "gradients": _count_bytes(gradients),
        "reduction": FUSION_THRESHOLD_BYTES,  # Horovod's own buffer, for what is small
        "optimizer": _count_bytes(state),
        "activations": _count_saved(model, lambda: forward(batch)),
        "batch": batch,
        "peaks": peaks,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "available": _find_memory(device),
        "peak_measured": True,
    }


def _take_loss(model: nn.Module, samples: int, name: str, device: torch.device) -> torch.Tensor:
    known = MODELS[name]
    if known.kind == "tokens":
        shape = (samples, *known.shape)
        inputs = torch.randint(known.classes, shape, device=device)
        labels = torch.randint(known.classes, shape, device=device)
    else:
        shape = known.shape
        if known.kind == "images":
            shape = (shape[2], *shape[:2])
        inputs = torch.randn(samples, *shape, device=device)
        labels = torch.randint(known.classes, (samples,), device=device)
    return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def _measure_peak(step: Callable[[int], None], samples: int, device: torch.device) -> int:
    """Return the most bytes that a step had allocated at one time, beyond those before it."""
    step(samples)  # what libraries allocate once for a shape is theirs to keep
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step(samples)
        return int(torch.cuda.max_memory_allocated(device) - before)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(samples)
    results: Any = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _count_saved(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    del loss  # until here all of them were alive: no address counts twice
    return sum(saved.values())


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _find_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
