"""The hyper-parameters of an optimizer, which must be the same on every rank."""

from __future__ import annotations

import torch

from hvdkit.hyper_parameters import list_values

__all__ = ["ADVICE", "describe_hyper_parameters"]

ADVICE = "broadcast_initial_state(model, optimizer) before the first step makes them equal"

# How a step is computed, not what: ranks with other hardware may choose otherwise.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


def describe_hyper_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """List what the optimizer itself reads of its parameter groups, as labels and texts.

    Not what others keep there, such as the ``initial_lr`` of a scheduler, which the ranks that
    need none may lack. The first entry is the count of the others.
    """
    names = [name for name in optimizer.defaults if name not in _IMPLEMENTATION]
    values = [
        pair
        for index, group in enumerate(optimizer.param_groups)
        for name in names
        if name in group
        for pair in list_values(f"{name} of parameter group {index}", group[name])
    ]
    return [("number of hyper-parameters", str(len(values))), *values]
