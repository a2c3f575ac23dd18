"""A gradient large enough to travel alone: all-reduced where autograd put it.

Its place in a flat buffer would cost a copy and the memory of the buffer, and win nothing: the
operation's fixed cost is small beside the transfer. Memory that others hold too is copied all
the same: what autograd puts into ``param.grad`` may be a view of what it still works on.
"""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_async_, synchronize

from hvdkit.torch.finite import probe
from hvdkit.torch.round import Round
from hvdkit.torch.slot import Slot, demand_trainable, refuse_graph

__all__ = ["DirectGradient", "Presence"]


class DirectGradient:
    """The gradient of one parameter, reduced in place.

    Collective: every rank must launch and finish it, once a round; a rank without a gradient
    contributes zeros.
    """

    def __init__(self, slot: Slot, name: str, process_set: ProcessSet) -> None:
        self.slot, self.slots = slot, [slot]
        self.in_flight = False
        self.done = False  # reduced in this backward pass, with no gradient since
        self.local_probe: torch.Tensor | None = None  # of what this rank sent last
        self.absent: torch.Tensor | None = None  # the result, where this rank had no gradient
        self._name, self._process_set = name, process_set
        self._handle: Any = None
        self._sent: torch.Tensor | None = None  # what is in flight
        self._kind = (slot.param.dtype, slot.param.device)
        slot.bucket, slot.view, slot.reduced = self, None, False

    def outdated(self) -> bool:
        """Whether the parameter was converted since the plan."""
        return self._kind != (self.slot.param.dtype, self.slot.param.device)

    def expect(self) -> None:
        """A backward pass begins."""
        self.done = False

    def take_back(self, slot: Slot) -> None:
        """Let a gradient be added to: nothing to do before it is launched."""

    def add(self, slot: Slot, now: Round) -> None:
        """Launch: autograd has just made or completed the gradient."""
        self._launch(now, made_by_autograd=True)

    def launch(self, now: Round) -> None:
        """Scale the gradient and start the all-reduce."""
        self._launch(now, made_by_autograd=False)

    def _launch(self, now: Round, *, made_by_autograd: bool) -> None:
        slot, param = self.slot, self.slot.param
        grad = param.grad
        if grad is None or not now.active or not param.requires_grad:
            buffer = self.absent = torch.zeros_like(param, requires_grad=False)
        else:
            if grad.requires_grad:
                refuse_graph(slot)
            self.absent = None
            if grad.layout != torch.strided:
                slot.sparse_dim = grad.sparse_dim()
                grad = grad.to_dense()
            factor = now.scale * now.reopen if slot.holds_result() else now.scale
            # One that was put there by hand is the caller's.
            ours = made_by_autograd or getattr(grad, "_hvdkit_reduced", False)
            strides = torch.empty_like(param, device="meta").stride()
            if ours and grad.stride() == strides and _is_sole_owner(grad):
                buffer = grad.mul_(factor) if factor != 1.0 else grad
            else:
                buffer = torch.empty_like(param, requires_grad=False)
                torch.mul(grad, factor, out=buffer)
            param.grad = buffer
        if now.probes:
            self.local_probe = probe(buffer)
        self.done, self.in_flight = False, True
        self._sent = buffer
        # Flat: Horovod takes no strides of channels_last, but they leave no gap either.
        self._handle = allreduce_async_(
            buffer.as_strided((buffer.numel(),), (1,), buffer.storage_offset()),
            name=self._name,
            op=Sum,
            postscale_factor=now.postscale,
            process_set=self._process_set,
        )

    def finish(self, now: Round) -> None:
        """Wait for the all-reduce; afterwards ``param.grad`` is the reduced gradient."""
        self.in_flight, self.done = False, True
        synchronize(self._handle)
        sent, self._handle, self._sent = self._sent, None, None
        # If it was taken away meanwhile (a pass broke off and gradients were cleared), it stays so.
        if sent is not None and self.absent is None and self.slot.param.grad is sent:
            sparse_dim = self.slot.sparse_dim
            self.slot.accept(sent if sparse_dim is None else sent.to_sparse(sparse_dim))


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of ``tensor``."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # `tensor` and `storage`


class Presence:
    """Whether any rank had a gradient of each parameter that travels alone.

    Launched at the end of a round, when all of them are.

    Collective: every rank must launch and finish it, once a round.
    """

    def __init__(self, members: list[DirectGradient], name: str, process_set: ProcessSet) -> None:
        self.in_flight = False
        self._members = members
        self._name, self._process_set = name, process_set
        self._handle: Any = None

    def launch(self, now: Round) -> None:
        """Start to add up the flags of all ranks."""
        flags = torch.tensor([float(member.absent is None) for member in self._members])
        self.in_flight = True
        self._handle = allreduce_async_(
            flags, name=self._name, op=Sum, process_set=self._process_set
        )

    def finish(self, now: Round) -> None:
        """Wait; where only others had a gradient, the result becomes ``param.grad``."""
        self.in_flight = False
        flags = synchronize(self._handle).tolist()
        for member, flag in zip(self._members, flags, strict=True):
            if member.absent is not None:
                if flag:
                    demand_trainable(member.slot)
                member.slot.accept(member.absent if flag else None)
                member.absent = None
