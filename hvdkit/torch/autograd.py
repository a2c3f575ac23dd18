"""What autograd is doing at the moment, as far as it tells."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

__all__ = ["accumulates", "comes_last", "find_custom_backward"]


def accumulates(param: torch.nn.Parameter) -> bool:
    """Whether the backward pass under way adds to ``param.grad``: autograd.grad() does not."""
    try:
        return torch._C._will_engine_execute_node(
            torch.autograd.graph.get_gradient_edge(param).node
        )
    except RuntimeError:  # what it raises inside autograd.grad()
        return False


def comes_last(param: Any, own_id: int) -> bool:
    """Whether no hook of the user's runs after the reducer's; next time none will.

    One that does may change the gradient or take it away.
    """
    hooks = param._post_accumulate_grad_hooks
    if len(hooks) == 1 or next(reversed(hooks)) == own_id:
        return True
    hooks[own_id] = hooks.pop(own_id)
    return False


def find_custom_backward() -> Any:
    """The autograd function inside whose ``backward`` this is called, innermost, or None."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
