"""``torch.amp.GradScaler``: gradients must be reduced before it looks, and a skipped step ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["reduce_before_unscaling"]


def reduce_before_unscaling(is_distributed: Callable[[object], bool]) -> None:
    """Make GradScaler reduce a wrapped optimizer's gradients before it checks them.

    After a complete accumulation window they are reduced already. In an incomplete one, and
    on a rank that ran no backward pass, ranks would see different gradients and some would
    skip the step that others wait in. A step that all of them skip ends the window as one
    that is taken does. GradScaler has no hooks for this, so its methods are wrapped, once.
    """
    original = torch.amp.GradScaler._unscale_grads_
    if hasattr(original, "_reduces_first"):
        return

    @functools.wraps(original)
    def unscale(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_distributed(optimizer):
            optimizer.synchronize()
        return original(self, optimizer, *args, **kwargs)

    step_unless_infinite = torch.amp.GradScaler._maybe_opt_step

    @functools.wraps(step_unless_infinite)
    def maybe_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        guard = getattr(optimizer, "_health", None)
        steps = guard.steps if guard is not None else 0
        result = step_unless_infinite(self, optimizer, *args, **kwargs)
        if is_distributed(optimizer):
            optimizer._reducer.end_window()
        if guard is not None and guard.steps == steps:
            guard.end_step_without_update()
        return result

    unscale._reduces_first = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    torch.amp.GradScaler._maybe_opt_step = maybe_step  # type: ignore[method-assign]
