"""An optimizer's state and hyper-parameters taken apart: a picklable frame, and its tensors.

``Optimizer.load_state_dict`` is no way to copy a state: it casts floating tensors to the dtype of
their parameter and replaces tensors that a captured graph or a scheduler still holds. Here state
is found by the parameter's place in the groups, and tensors are written where they already are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hvdkit.errors import HvdkitError

StateFrame = dict[str, Any]
"""All of an optimizer's state and options, with slots where tensors were."""

__all__ = ["StateFrame", "apply_state_frame", "list_parameters", "take_state_apart"]


@dataclass(frozen=True)
class _Slot:
    """Where a tensor was taken out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def list_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List the parameters over all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def take_state_apart(
    optimizer: torch.optim.Optimizer,
) -> tuple[StateFrame, list[torch.Tensor]]:
    """Split state and options into a picklable frame and the tensors themselves, in order.

    Raises:
        HvdkitError: If the state holds a tensor that cannot be sent as bytes, or state of a
            parameter that is in no group.
    """
    known = {id(p) for p in list_parameters(optimizer)}
    if any(isinstance(key, torch.Tensor) and id(key) not in known for key in optimizer.state):
        raise HvdkitError(
            "the optimizer holds state of a parameter that is in none of its groups; remove "
            "that entry from optimizer.state"
        )
    tree = _build_tree(optimizer)
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise HvdkitError(
                f"the optimizer state holds a tensor of layout {tensor.layout} on "
                f"{tensor.device}; only dense tensors with data can be broadcast"
            )
    return pytree.tree_map(_slot_or_value, tree), tensors


def apply_state_frame(optimizer: torch.optim.Optimizer, frame: StateFrame) -> list[torch.Tensor]:
    """Give an optimizer the state and options of a frame; tensor contents are the caller's.

    Tensors of the right shape, dtype and kind of device stay in place; others are allocated.
    State that the frame lacks is removed.

    Returns:
        The tensors to fill, in the order of ``take_state_apart``.
    """
    parameters = list_parameters(optimizer)
    mine = dict(pytree.tree_flatten_with_path(_build_tree(optimizer))[0])
    paths, structure = pytree.tree_flatten_with_path(frame)
    leaves, to_fill = [], []
    for path, leaf in paths:
        if isinstance(leaf, _Slot):
            leaf = _find_room(leaf, mine.get(path), _find_parameter(path, parameters))
            to_fill.append(leaf)
        leaves.append(leaf)
    tree = pytree.tree_unflatten(leaves, structure)
    optimizer.state.clear()
    for (kind, key), value in tree["state"].items():
        optimizer.state[parameters[key] if kind == "parameter" else key] = value
    for group, options in zip(optimizer.param_groups, tree["options"], strict=True):
        group.update(options)
    return to_fill


def _build_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    places = {id(p): index for index, p in enumerate(list_parameters(optimizer))}
    state: dict[tuple[str, Hashable], Any] = {}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            state["other", key] = value
        elif id(key) in places:
            state["parameter", places[id(key)]] = value
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": state, "options": options}


def _slot_or_value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _Slot(tuple(leaf.shape), leaf.dtype, leaf.device.type)
    return leaf


def _find_parameter(path: pytree.KeyPath, parameters: list[torch.Tensor]) -> torch.Tensor:
    """Find the parameter that a leaf belongs to; the first for what belongs to none."""
    if path[0] == pytree.MappingKey("state"):
        entry = path[1]
        assert isinstance(entry, pytree.MappingKey)
        kind, index = entry.key
        if kind == "parameter":
            return parameters[index]
    return parameters[0] if parameters else torch.empty(0)


def _find_room(slot: _Slot, existing: Any, parameter: torch.Tensor) -> torch.Tensor:
    if (
        isinstance(existing, torch.Tensor)
        and _slot_or_value(existing) == slot
        and existing.layout is torch.strided
    ):
        return existing
    if slot.device_type != parameter.device.type:
        return torch.empty(slot.shape, dtype=slot.dtype, device=slot.device_type)
    if slot.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=slot.dtype, requires_grad=False)
    return torch.empty(slot.shape, dtype=slot.dtype, device=parameter.device)
