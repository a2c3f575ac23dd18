"""Prove that all ranks hold the same model."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set
from torch.utils import _pytree as pytree

from hvdkit.errors import HvdkitError
from hvdkit.hyper_parameters import list_values
from hvdkit.replicas import demand_equal_replicas
from hvdkit.torch.collectives import gather_over
from hvdkit.torch.digest import digest_tensors
from hvdkit.torch.hyper_parameters import describe_hyper_parameters
from hvdkit.torch.optimizer_state import list_parameters
from hvdkit.torch.transport import broadcast_tensors

__all__ = ["check_replicas", "compare_replicas"]

Part = tuple[str, torch.Tensor | str]


def check_replicas(
    model: torch.nn.Module,
    buffers: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise unless every rank holds the same parameters, to the last bit.

    Compares one digest, so hardly anything travels; every tensor is read once, where it lies. If
    the digests differ the first tensor that does is found and sent.

    Collective: every rank of ``process_set`` must call.

    Args:
        model: The replica of this rank.
        buffers: Compare the buffers as well. Batch-norm statistics are local to a rank in
            training and differ until ``average_buffers``.
        process_set: The ranks to compare.
        optimizer: Compare its state and hyper-parameters as well.

    Raises:
        ReplicaMismatchError: On every rank; names the first tensor that differs, the ranks that
            hold each version of it and the largest difference.
    """
    compare_replicas("check_replicas", model, buffers, optimizer, process_set)


def compare_replicas(
    name: str,
    model: torch.nn.Module,
    buffers: bool,
    optimizer: torch.optim.Optimizer | None,
    process_set: ProcessSet,
) -> None:
    """Do what ``check_replicas`` does; ``name`` names the operations."""
    parts: list[Part] = [
        *model.named_parameters(),
        *(model.named_buffers() if buffers else ()),
        *(_list_optimizer(optimizer, model) if optimizer is not None else ()),
    ]

    def digest() -> bytes:
        texts = [(name, _describe(name, value)) for name, value in parts]
        whole = hashlib.sha256(repr(texts).encode())
        whole.update(digest_tensors(v for _, v in parts if isinstance(v, torch.Tensor)))
        return whole.digest()

    def describe() -> list[tuple[str, str]]:
        return [
            (name, f"{_describe(name, value)} digest {digest_tensors([value]).hex()[:16]}")
            if isinstance(value, torch.Tensor)
            else (name, value)
            for name, value in parts
        ]

    def measure(index: int, root: int) -> float:
        tensor = parts[index][1]
        assert isinstance(tensor, torch.Tensor)
        reference = tensor.detach().clone(memory_format=torch.contiguous_format)
        broadcast_tensors([reference], root, name=f"{name}.reference", process_set=process_set)
        return _find_largest(tensor.detach(), reference)

    demand_equal_replicas(
        digest,
        describe,
        measure,
        name=name,
        gather=gather_over(process_set),
        ranks=process_set.ranks,
    )


def _list_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[Part]:
    """List state and hyper-parameters, whatever the order in which the state was made."""
    names = {id(param): name for name, param in model.named_parameters()}
    parts: list[Part] = list(describe_hyper_parameters(optimizer))
    for index, param in enumerate(list_parameters(optimizer)):
        owner = names.get(id(param), f"parameter {index}")
        state = optimizer.state.get(param, {})
        for key in sorted(state, key=str):
            value = state[key]
            if isinstance(value, torch.Tensor):  # mostly, and there are many
                parts.append((f"{key} of {owner}", value))
                continue
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                label = f"{key}{pytree.keystr(path)} of {owner}"
                parts += [(label, leaf)] if isinstance(leaf, torch.Tensor) else _text(label, leaf)
    return parts


def _text(label: str, value: Any) -> list[Part]:
    return list(list_values(label, value))


def _describe(name: str, value: torch.Tensor | str) -> str:
    """Return a text, or the dtype and shape of a tensor that can be compared."""
    if isinstance(value, str):
        return value
    if torch.nn.parameter.is_lazy(value) or value.device.type == "meta":
        raise HvdkitError(f"{name!r} has no data to compare; run one forward pass first")
    if value.layout is not torch.strided:
        raise HvdkitError(f"{name!r} has layout {value.layout}; only dense tensors are compared")
    return f"{value.dtype} {tuple(value.shape)}"


def _find_largest(own: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN where one side alone is NaN."""
    wide = torch.complex128 if own.is_complex() else torch.float64
    a, b = (one.cpu().to(wide).reshape(-1) for one in (own, reference))
    if bool((a.isnan() != b.isnan()).any()):
        return math.nan
    unequal = (a != b) & ~a.isnan()  # inf - inf is NaN
    largest = float((a - b).abs()[unequal].max()) if bool(unequal.any()) else 0.0
    whole = not (own.is_floating_point() or own.is_complex())
    # Large integers may be one number as float64.
    return 1.0 if whole and largest == 0 and not torch.equal(own, reference) else largest
