"""Give every rank the same start: parameters, buffers, optimizer state and hyper-parameters."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from horovod.torch.mpi_ops import ProcessSet, global_process_set
from torch.nn.parameter import is_lazy

from hvdkit.errors import HvdkitError
from hvdkit.torch.agreement import demand_equal_entries
from hvdkit.torch.collectives import broadcast_object
from hvdkit.torch.optimizer_state import (
    StateFrame,
    apply_state_frame,
    list_parameters,
    take_state_apart,
)
from hvdkit.torch.transport import broadcast_tensors

Entries = list[tuple[str, str]]

__all__ = ["broadcast_initial_state", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_initial_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy a model and its optimizer from one rank to all others, to the last bit.

    Parameters and buffers (those that are not saved as well), optimizer state and the options
    of the parameter groups. It only copies: no optimizer step is taken, nothing on the root
    changes, a fresh optimizer stays fresh, and whatever state the other ranks had gives way to
    the root's. Tensors that are there already are written in place, tied ones once. All
    tensors travel in one broadcast (large models: one per 128 MiB), the rest in another.

    Collective: every rank of ``process_set`` must call.

    Args:
        model: Of the same parameters and buffers on every rank.
        optimizer: Plain or distributed; of the same class, groups and parameters everywhere.
        root_rank: The global rank to copy from.
        process_set: The ranks to copy to.

    Raises:
        RankDisagreementError: On every rank, if a name, shape, dtype, kind of device, group or
            the optimizer's class differs; names the first and the ranks on each side.
        HvdkitError: On every rank, if a tensor has no data yet (lazy modules, meta device).
    """
    named = _list_model_tensors(model)
    _broadcast("broadcast_initial_state", named, optimizer, root_rank, process_set)


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy tensors from one rank to all others, in place.

    Collective: every rank of ``process_set`` must call.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``,
            or a list of either kind.
        root_rank: The global rank to copy from.
        process_set: The ranks to copy to.

    Raises:
        RankDisagreementError: On every rank, if names, shapes, dtypes or order differ.
        HvdkitError: If ``params`` holds something that is not a tensor.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items(), key=lambda item: str(item[0]))
    elif isinstance(params, torch.Tensor | torch.nn.Module) or not isinstance(params, Iterable):
        raise HvdkitError(
            f"broadcast_parameters takes a dict or an iterable of tensors, got "
            f"{type(params).__name__}; pass model.state_dict() or model.named_parameters()"
        )
    else:
        pairs = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(params)]
    _broadcast("broadcast_parameters", pairs, None, root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy an optimizer's state and hyper-parameters from one rank to all others.

    As ``broadcast_initial_state`` does, for any optimizer, LBFGS included, and without a step.

    Collective: every rank of ``process_set`` must call.

    Args:
        optimizer: Plain or distributed.
        root_rank: The global rank to copy from.
        model: Not needed; Horovod's signature has it.
        process_set: The ranks to copy to.

    Raises:
        RankDisagreementError: On every rank, if class, groups or parameters differ.
    """
    _broadcast("broadcast_optimizer_state", [], optimizer, root_rank, process_set)


def _broadcast(
    name: str,
    named: list[tuple[str, Any]],
    optimizer: torch.optim.Optimizer | None,
    root_rank: int,
    process_set: ProcessSet,
) -> None:
    if not process_set.included():
        raise HvdkitError(f"{name}: this rank is not in the process set {process_set}")
    is_root = process_set.ranks[process_set.rank()] == root_rank
    frame = b""
    tensors: list[torch.Tensor] = []
    entries: Entries | HvdkitError
    try:
        if root_rank not in process_set.ranks:
            raise HvdkitError(f"root_rank {root_rank} is not one of ranks {process_set.ranks}")
        entries = [("root_rank", str(root_rank)), *_describe(named)]
        if optimizer is not None:
            entries += _describe_optimizer(optimizer, {id(t): n for n, t in named})
        if optimizer is not None and is_root:
            taken, tensors = take_state_apart(optimizer)
            frame = _pickle(taken)
    except HvdkitError as error:
        entries = error
    demand_equal_entries(f"{name}: what is broadcast", entries, name=name, process_set=process_set)
    if optimizer is not None:
        received = broadcast_object(frame, root_rank, name=f"{name}.frame", process_set=process_set)
        if not is_root:
            tensors = apply_state_frame(optimizer, pickle.loads(received))
    tensors = [tensor for _, tensor in _drop_tied(named)] + tensors
    broadcast_tensors(tensors, root_rank, name=f"{name}.tensors", process_set=process_set)


def _pickle(frame: StateFrame) -> bytes:
    """Pickle before the ranks agree to go on, so that a failure still reaches all of them."""
    try:
        return cloudpickle.dumps(frame)
    except Exception as error:
        raise HvdkitError(
            f"the optimizer's state or options cannot be pickled ({error}); keep locks, files "
            "and the like out of optimizer.state and optimizer.param_groups"
        ) from error


def _list_model_tensors(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _describe(named: list[tuple[str, Any]]) -> Entries:
    for name, tensor in named:
        _check_sendable(name, tensor)
    return [
        (str(name), f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}")
        for name, tensor in _drop_tied(named)
    ]


def _check_sendable(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise HvdkitError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if is_lazy(tensor):
        raise HvdkitError(f"{name!r} has no shape yet; run one forward pass on every rank first")
    if tensor.device.type == "meta":
        raise HvdkitError(f"{name!r} is on the meta device; load or initialize the model first")
    if tensor.layout is not torch.strided:
        raise HvdkitError(f"{name!r} has layout {tensor.layout}; only dense tensors can be sent")


def _drop_tied(named: list[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Keep the first of several names for the same memory."""
    seen, kept = set(), []
    for name, tensor in named:
        memory = (
            tensor.device,
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if memory not in seen or not tensor.numel():
            seen.add(memory)
            kept.append((name, tensor))
    return kept


def _describe_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Entries:
    entries = [("optimizer", type(optimizer).__name__)]
    for index, group in enumerate(optimizer.param_groups):
        entries.append((f"param group {index}", f"{len(group['params'])} parameters"))
    for index, parameter in enumerate(list_parameters(optimizer)):
        name = names.get(id(parameter), f"parameter {index}")
        ((_, value),) = _describe([(name, parameter)])
        entries.append((f"optimizer's {name}", value))
    return entries
