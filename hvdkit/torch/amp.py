"""``torch.amp.GradScaler``: gradients must be reduced before it looks at them."""

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
    skip the step that others wait in. GradScaler has no hook for this, so its method is
    wrapped, once.
    """
    original = torch.amp.GradScaler._unscale_grads_
    if hasattr(original, "_reduces_first"):
        return

    @functools.wraps(original)
    def unscale(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_distributed(optimizer):
            optimizer.synchronize()
        return original(self, optimizer, *args, **kwargs)

    unscale._reduces_first = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
