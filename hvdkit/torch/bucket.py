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

from hvdkit.torch.wire import Wire, make_wire

__all__ = ["GradientBucket", "Round", "Slot"]

_ALIGNMENT_BYTES = 64  # a cache line: no two gradients share one

# A gradient this large is written as soon as it is ready: it is still in the cache, and its
# memory is free for the next one. Smaller ones are written together, for Python's sake.
_WRITE_AT_ONCE_NUMEL = 1 << 15


@dataclass
class Round:
    """What one reduction divides by; the same for all buckets of an optimizer.

    Attributes:
        scale: Each local gradient is multiplied by it before the sum.
        postscale: The sum is multiplied by it.
        reopen: Turns a reduced gradient back into a local one: reducing it again with this
            factor in front gives the same value.
        mean: Whether the result is a mean over ranks (``scale`` has the division in it).
        active: Whether this rank takes part; if not, it contributes zeros.
        ranks: How many ranks take part.
    """

    scale: float = 1.0
    postscale: float = 1.0
    reopen: float = 1.0
    mean: bool = True
    active: bool = True
    ranks: int = 1


class Slot:
    """One parameter, its place in a bucket, and how far its gradient has come."""

    __slots__ = (
        "bucket",
        "fired",
        "name",
        "param",
        "ready",
        "reduced",
        "sparse_dim",
        "view",
        "window",
        "written",
    )

    def __init__(self, param: torch.nn.Parameter, name: str) -> None:
        self.param = param
        self.name = name
        self.bucket: GradientBucket | None = None
        self.view: torch.Tensor | None = None
        self.sparse_dim: int | None = None  # set when the gradient travels sparse
        self.window = 0  # the accumulation window that `fired` counts in
        self.fired = 0  # backward passes of that window that reached the parameter
        self.ready = -1  # the last round in which it counted as ready
        self.written = -1  # the last round in which its gradient was written to the buffer
        self.reduced = False  # `param.grad` is a result that no pass has added to since

    def layout(self) -> str:
        """What must be equal on all ranks for flat buffers to match, in words."""
        strides = torch.empty_like(self.param, device="meta").stride()
        dtype = str(self.param.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.param.shape)} with strides {list(strides)}"


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
        self.pending = 0
        self._name, self._process_set, self._compression = name, process_set, compression
        self._buffer: torch.Tensor | None = None
        self._flags: torch.Tensor | None = None
        self._wire: Wire | None = None
        self._missing: list[int] = []
        for slot in slots:
            slot.bucket, slot.view, slot.reduced = self, None, False
        self.expect()

    def expect(self) -> None:
        """Count the gradients that must come before the bucket is full."""
        self.pending = sum(slot.param.requires_grad for slot in self.slots)

    def _allocate(self) -> None:
        # At the first write and not at planning: while gradients of the first step wait to be
        # moved here, only one bucket at a time exists twice.
        first = self.slots[0].param
        step = max(1, _ALIGNMENT_BYTES // first.element_size())
        offsets, end = [], 0
        for slot in self.slots:
            offsets.append(end)
            end += -(-slot.param.numel() // step) * step
        # The flags ride behind the gradients: was there one, on any rank?
        self._buffer = torch.zeros(end + len(self.slots), dtype=first.dtype, device=first.device)
        self._flags = self._buffer[end:]
        for slot, offset in zip(self.slots, offsets, strict=True):
            strides = torch.empty_like(slot.param, device="meta").stride()
            slot.view = self._buffer.as_strided(slot.param.shape, strides, offset)
        flat = self._buffer
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        self._wire = make_wire(flat, self._name, self._process_set, self._compression)

    def write(self, slot: Slot, now: Round, number: int) -> None:
        """Write one large dense gradient into the buffer ahead of the launch."""
        grad = slot.param.grad
        if (
            slot.written == number
            or not now.active
            or grad is None
            or grad.layout != torch.strided
            or grad.numel() < _WRITE_AT_ONCE_NUMEL
        ):
            return
        if self._buffer is None:
            self._allocate()
        torch.mul(grad, self._factor(now), out=slot.view)
        slot.param.grad = slot.view
        slot.written = number

    def launch(self, now: Round, number: int) -> None:
        """Write what is not yet written and start the all-reduce."""
        if self._buffer is None:
            self._allocate()
        assert self._buffer is not None and self._flags is not None and self._wire is not None
        factor = self._factor(now)
        views: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        moved: list[Slot] = []
        missing: list[int] = []
        for index, slot in enumerate(self.slots):
            if slot.written == number:
                continue
            param, view = slot.param, slot.view
            assert view is not None
            grad = param.grad
            if grad is None or not now.active or not param.requires_grad:
                view.zero_()
                missing.append(index)
            elif grad is view:
                if slot.reduced and now.reopen != 1.0:
                    view.mul_(now.reopen)
                view.mul_(factor)
            else:
                if grad.layout != torch.strided:
                    grad = grad.to_dense()
                views.append(view)
                sources.append(grad)
                moved.append(slot)
        if views:
            torch._foreach_copy_(views, sources)
            if factor != 1.0:
                torch._foreach_mul_(views, factor)
            for slot in moved:
                slot.param.grad = slot.view
        self._flags.fill_(1.0)
        if missing:
            self._flags[missing] = 0.0
        self._missing = missing
        self.in_flight = True
        self._wire.start(now.postscale)

    def finish(self, now: Round) -> None:
        """Wait for the all-reduce; afterwards each ``param.grad`` is the reduced gradient."""
        assert self._buffer is not None and self._flags is not None and self._wire is not None
        self.in_flight = False
        self._wire.finish()
        if self._wire.lossy and not now.mean:
            self._buffer.mul_(now.ranks)
        if self._missing:
            found = self._flags.real.tolist() if self._flags.is_complex() else self._flags.tolist()
            for index in self._missing:
                slot = self.slots[index]
                used = found[index] != 0 and slot.param.requires_grad
                slot.param.grad = slot.view if used else None
            self._missing = []
        if now.reopen != 1.0:
            for slot in self.slots:
                slot.reduced = True
        self.expect()

    def _factor(self, now: Round) -> float:
        # A sum in a narrow format may overflow where the result in the parameter's format
        # does not: average on the way, multiply afterwards.
        assert self._wire is not None
        return now.scale / now.ranks if self._wire.lossy and not now.mean else now.scale
