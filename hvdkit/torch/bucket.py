"""A bucket: gradients of several parameters in one flat buffer that is all-reduced in place.

Autograd hands over a fresh gradient. It is written into the flat buffer, already divided by
what the mean divides by, and ``param.grad`` becomes the view of its place there: one pass over
the data, no zeroing, no copy into and out of Horovod's own fusion buffer.

Source: Li et al., "PyTorch Distributed", VLDB 2020 (flat buckets, gradients as views).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import ProcessSet

from hvdkit.torch.finite import get_values, probe
from hvdkit.torch.round import Round
from hvdkit.torch.slot import Slot, demand_trainable, refuse_graph
from hvdkit.torch.wire import Wire, make_wire

__all__ = ["GradientBucket"]

_ALIGNMENT_BYTES = 64  # a cache line: no two gradients share one


@dataclass
class _FlatBuffer:
    buffer: torch.Tensor  # the gradients, each at an aligned offset, then the flags
    flags: torch.Tensor  # one for each parameter: not zero if any rank had a gradient
    wire: Wire

    def factor(self, now: Round) -> float:
        """What a local gradient is multiplied by on its way into the buffer."""
        # A sum in a narrow format may overflow where the result in the parameter's format
        # does not: average on the way, multiply afterwards.
        return now.scale / now.ranks if self.wire.lossy and not now.mean else now.scale


class GradientBucket:
    """Gradients of one dtype on one device, reduced together.

    Collective: every rank must launch and finish it, once a round.

    Args:
        slots: The parameters, of one dtype and device.
        name: The all-reduce's name: the same on every rank, unlike any other in flight.
        process_set: The ranks to reduce over.
        compression: ``hvdkit.torch.Compression.none``, ``fp16``, ``bf16`` or a class alike.
    """

    def __init__(
        self,
        slots: list[Slot],
        name: str,
        process_set: ProcessSet,
        compression: type[Compressor],
    ) -> None:
        self.slots = slots
        self.in_flight = False
        self.done = False  # reduced in this backward pass, with no gradient since
        self.local_probe: torch.Tensor | None = None  # of what this rank sent last
        self.pending = 0
        self._filling = 0  # counts how often the bucket began to fill
        self._ahead: dict[Slot, float] = {}  # written before the launch, times what
        self._name, self._process_set, self._compression = name, process_set, compression
        self._flat: _FlatBuffer | None = None
        self._missing: list[int] = []
        self._densified = [slot for slot in slots if slot.sparse_dim is not None]
        for slot in slots:
            slot.bucket, slot.view, slot.reduced = self, None, False
            slot.ready = -1  # fillings count anew
        self.expect()

    def outdated(self) -> bool:
        """Whether parameters were converted (``model.to(...)``) since the plan.

        A conversion changes ``param.grad`` in place: our views of the buffer are elsewhere then.
        """
        flat = self._flat
        if flat is None:
            return False
        dtype = flat.buffer.dtype
        return (
            list(map(torch.Tensor.data_ptr, self._views)) != self._addresses
            or any(slot.param.dtype != dtype for slot in self.slots)
            or self.slots[0].param.device != flat.buffer.device
        )

    def expect(self) -> None:
        """Count the gradients that must come in a backward pass before the bucket is full."""
        for slot in list(self._ahead):  # of a pass that broke off
            self.take_back(slot)
        self._filling += 1
        self.done = False
        self._expected = self.pending = sum(slot.param.requires_grad for slot in self.slots)

    def _allocate(self) -> _FlatBuffer:
        # At the first write and not at planning: while gradients of the first step wait to be
        # moved here, only one bucket at a time exists twice.
        first = self.slots[0].param
        step = max(1, _ALIGNMENT_BYTES // first.element_size())
        offsets, end = [], 0
        for slot in self.slots:
            offsets.append(end)
            end += -(-slot.param.numel() // step) * step
        # The flags ride behind the gradients: was there one, on any rank?
        buffer = torch.zeros(end + len(self.slots), dtype=first.dtype, device=first.device)
        for slot, offset in zip(self.slots, offsets, strict=True):
            strides = torch.empty_like(slot.param, device="meta").stride()
            slot.view = buffer.as_strided(slot.param.shape, strides, offset)
        self._views = [slot.view for slot in self.slots if slot.view is not None]
        self._addresses = [view.data_ptr() for view in self._views]
        real = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
        wire = make_wire(real, self._name, self._process_set, self._compression)
        self._flat = _FlatBuffer(buffer, buffer[end:], wire)
        return self._flat

    def add(self, slot: Slot, now: Round) -> None:
        """Count a gradient that is ready; the one that fills the bucket launches it."""
        self.done = False
        if slot.ready == self._filling:
            return
        slot.ready = self._filling
        if slot.large and now.active:
            self._write_at_once(slot, now)
        self.pending -= 1
        if self.pending == 0:
            self.launch(now)

    def _write_at_once(self, slot: Slot, now: Round) -> None:
        grad = slot.param.grad
        if grad is None or grad is slot.view or grad.layout != torch.strided:
            return
        if grad.requires_grad:
            refuse_graph(slot)
        flat = self._flat or self._allocate()
        self._ahead[slot] = factor = flat.factor(now)
        torch.mul(grad, factor, out=slot.view)
        slot.param.grad = slot.view

    def take_back(self, slot: Slot) -> None:
        """Let a gradient that was written ahead be added to before the launch."""
        factor = self._ahead.pop(slot, None)
        if factor is not None and slot.view is not None and slot.param.grad is slot.view:
            slot.view.div_(factor)

    def launch(self, now: Round) -> None:
        """Write what is not yet written and start the all-reduce."""
        flat = self._flat or self._allocate()
        factor = flat.factor(now)
        views: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        moved: list[Slot] = []
        missing: list[int] = []
        ahead, active, strided = self._ahead, now.active, torch.strided
        for index, slot in enumerate(self.slots):
            if ahead and slot in ahead and slot.param.grad is slot.view:
                continue
            param, view = slot.param, slot.view
            assert view is not None
            grad = param.grad
            if grad is None or not active or not param.requires_grad:
                view.zero_()
                missing.append(index)
            elif grad is view:
                if slot.reduced and now.reopen != 1.0:
                    view.mul_(now.reopen)
                view.mul_(factor)
            else:
                if grad.requires_grad:
                    refuse_graph(slot)
                if grad.layout is not strided:
                    if slot.sparse_dim is None:  # its first gradient came after the plan
                        slot.sparse_dim = grad.sparse_dim()
                        self._densified.append(slot)
                    grad = grad.to_dense()
                views.append(view)
                sources.append(grad)
                moved.append(slot)
        if views:
            torch._foreach_copy_(views, sources)
            for slot, view in zip(moved, views, strict=True):
                slot.param.grad = view
            if len(moved) + len(missing) == len(self.slots):
                flat.buffer.mul_(factor)  # nothing in it is scaled yet: once for all is faster
            elif factor != 1.0:
                torch._foreach_mul_(views, factor)
        if now.probes:
            self.local_probe = probe(get_values(flat.buffer[: -len(self.slots)]))
        flat.flags.fill_(1.0)
        if missing:
            flat.flags[missing] = 0.0
        self._missing = missing
        self.in_flight = True
        self._filling += 1
        self._ahead.clear()
        flat.wire.start(now.postscale)

    def probe_result(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return a probe of the reduced gradients, and those that are no longer in the buffer."""
        grads = [(slot.view, slot.param.grad) for slot in self.slots]
        elsewhere = [grad for view, grad in grads if grad is not None and grad is not view]
        if self._flat is None or len(elsewhere) == len(self.slots):
            return [], elsewhere
        return [probe(get_values(self._flat.buffer[: -len(self.slots)]))], elsewhere

    def finish(self, now: Round) -> None:
        """Wait for the all-reduce; afterwards each ``param.grad`` is the reduced gradient."""
        assert self._flat is not None
        self.in_flight, self.done = False, True
        self._flat.wire.finish()
        if self._flat.wire.lossy and not now.mean:
            self._flat.buffer.mul_(now.ranks)
        if self._missing:
            found = self._flat.flags.tolist()
            for index in self._missing:
                slot = self.slots[index]
                used = found[index] != 0
                if used:
                    demand_trainable(slot)
                slot.param.grad = slot.view if used else None
            self._missing = []
        if now.reopens:
            for slot in self.slots:
                slot.reduced = True
        for slot in self._densified:
            if slot.param.grad is not None and slot.sparse_dim is not None:
                slot.param.grad = slot.param.grad.to_sparse(slot.sparse_dim)
        self.pending = self._expected
