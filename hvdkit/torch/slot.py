"""A parameter whose gradient is reduced, and how far that has come."""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch

from hvdkit.errors import HvdkitError, RankDisagreementError
from hvdkit.torch.round import Round

__all__ = ["Slot", "demand_trainable", "refuse_graph"]

# A gradient this large is written as soon as it is ready: it is still in the cache, and its
# memory is free for the next one. Smaller ones are written together, for Python's sake.
_WRITE_AT_ONCE_NUMEL = 1 << 15


class Carrier(Protocol):
    """What a gradient travels in: a bucket, or alone."""

    in_flight: bool

    def add(self, slot: Slot, now: Round) -> None:
        """Take a gradient that is ready."""

    def take_back(self, slot: Slot) -> None:
        """Take back one that a further pass is about to add to."""


class Slot:
    """One parameter, its place in a bucket, and how far its gradient has come."""

    __slots__ = (
        "bucket",
        "large",
        "name",
        "param",
        "ready",
        "reduced",
        "sparse_dim",
        "view",
    )

    def __init__(self, param: torch.nn.Parameter, name: str) -> None:
        self.param = param
        self.name = name
        self.large = param.numel() >= _WRITE_AT_ONCE_NUMEL
        self.bucket: Carrier | None = None
        self.view: torch.Tensor | None = None
        self.sparse_dim: int | None = None  # set when the gradient is sparse
        self.ready = -1  # the last filling of the bucket for which it counted as ready
        self.reduced = False  # `param.grad` is a result that no pass has added to since

    def accept(self, result: torch.Tensor | None) -> None:
        """Make ``result`` the reduced gradient."""
        self.param.grad = result
        self.reduced = True
        if result is not None:
            # On the tensor itself: whatever takes its place is not reduced, and a reference
            # would keep its memory.
            result._hvdkit_reduced = True  # type: ignore[attr-defined]

    def holds_result(self) -> bool:
        """Whether ``param.grad`` is what was accepted, and no pass has added to it since."""
        grad = self.param.grad
        if not self.reduced or grad is None:
            return False
        return grad is self.view or getattr(grad, "_hvdkit_reduced", False)

    def layout(self) -> str:
        """What must be equal on all ranks for flat buffers to match, in words."""
        strides = torch.empty_like(self.param, device="meta").stride()
        dtype = str(self.param.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.param.shape)} with strides {list(strides)}"


def demand_trainable(slot: Slot) -> None:
    """Raise RankDisagreementError if a parameter with a gradient on some rank is frozen here."""
    if not slot.param.requires_grad:
        raise RankDisagreementError(
            f"{slot.name!r} is frozen on this rank (requires_grad=False) but got a gradient on "
            "another: the replicas would drift apart; freeze it on every rank at the same step"
        )


def refuse_graph(slot: Slot) -> NoReturn:
    """Raise HvdkitError for a gradient that is itself part of a graph."""
    raise HvdkitError(
        f"the gradient of {slot.name!r} carries a graph (backward(create_graph=True)), which "
        "a reduced gradient cannot; use torch.autograd.grad() for the inner derivative and "
        "an ordinary backward() before the step"
    )
