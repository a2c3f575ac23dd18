"""Names for an optimizer's parameters, checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["describe_parameters", "name_parameters"]


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> list[tuple[str, torch.nn.Parameter]]:
    """Pair each parameter of ``optimizer``, in its order, with its name.

    Args:
        named_parameters: As ``model.named_parameters()`` gives them; it may name more
            parameters than the optimizer has. None makes names from positions.

    Raises:
        ValueError: A name occurs twice, or a parameter of the optimizer has none.
        TypeError: The items are not pairs of a string and a tensor.
    """
    own = [
        (f"group{i}.{j}", param)
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    ]
    if named_parameters is None:
        return own
    pairs: list[Any] = list(
        named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    )
    for pair in pairs:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise TypeError(
                "named_parameters must be pairs (name, parameter), as model.named_parameters() "
                f"gives them, not {type(pair).__name__}; model.parameters() has no names"
            )
    twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if twice:
        raise ValueError(
            f"names in named_parameters must be unique, but {', '.join(map(repr, twice))} "
            "occurs twice; put a prefix before the names of each model"
        )
    names: dict[int, str] = {}
    for name, param in pairs:
        names.setdefault(id(param), name)  # tied weights keep their first name
    unnamed = [place for place, param in own if id(param) not in names]
    if unnamed:
        raise ValueError(
            f"{len(unnamed)} of the optimizer's {len(own)} parameters are not in "
            f"named_parameters, the first at {unnamed[0]}; pass the named_parameters() of "
            "every model that the optimizer trains"
        )
    return [(names[id(param)], param) for _, param in own]


def describe_parameters(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> list[tuple[str, str]]:
    """Describe what must be equal on all ranks, as (label, text) in the optimizer's order."""
    described = []
    for position, (name, param) in enumerate(named_parameters):
        shape = "of unknown shape" if torch.nn.parameter.is_lazy(param) else str(list(param.shape))
        state = "trainable" if param.requires_grad else "frozen"
        dtype = str(param.dtype).removeprefix("torch.")
        described.append((f"parameter {position}", f"{name} {shape} {dtype} {state}"))
    return described
