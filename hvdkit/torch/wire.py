"""How a flat gradient buffer travels: as it is, cast to another dtype, or compressed.

A wire belongs to one buffer. ``start`` begins the reduction of what the buffer holds,
``finish`` waits and leaves the result in the buffer. Between the two nobody touches it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from horovod.torch.compression import Compression as HorovodCompression
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import (
    ProcessSet,
    Sum,
    allgather_async,
    allreduce_async_,
    alltoall_async,
    synchronize,
)

from hvdkit.torch.transport import pick_wire_device

__all__ = ["Compression", "Wire", "make_wire", "travels_as_it_is"]

# Types that Horovod 0.28.1 reduces; bfloat16 is not among them.
_REDUCIBLE = {torch.float16, torch.float32, torch.float64}


class _BFloat16Compressor(Compressor):
    """Rounds floating-point tensors to bfloat16 and back.

    ``DistributedOptimizer`` sends the 16 bits and adds in float32. Elsewhere (``allreduce``)
    the rounded values travel as float32, since Horovod cannot add bfloat16.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        if tensor.dtype.is_floating_point:
            return tensor.to(torch.bfloat16).to(torch.float32), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class Compression(HorovodCompression):
    """Gradient compression for the all-reduce: ``none``, ``fp16`` or ``bf16``."""

    bf16 = _BFloat16Compressor


class Wire(Protocol):
    """The reduction of one buffer. Collective: every rank must start and finish it."""

    lossy: bool

    def start(self, postscale: float) -> None:
        """Begin to sum the buffer over the ranks, each result times ``postscale``."""

    def finish(self) -> None:
        """Wait until the buffer holds the result."""


class _DirectWire:
    """One in-place asynchronous all-reduce of the buffer itself."""

    lossy = False

    def __init__(self, buffer: torch.Tensor, name: str, process_set: ProcessSet) -> None:
        self._buffer, self._name, self._process_set = buffer, name, process_set
        self._handle: Any = None

    def start(self, postscale: float) -> None:
        self._handle = allreduce_async_(
            self._buffer,
            name=self._name,
            op=Sum,
            postscale_factor=postscale,
            process_set=self._process_set,
        )

    def finish(self) -> None:
        synchronize(self._handle)


class _CompressedWire:
    """The buffer is compressed to another tensor, which is all-reduced and unpacked again."""

    def __init__(
        self,
        buffer: torch.Tensor,
        name: str,
        process_set: ProcessSet,
        compressor: type[Compressor],
        lossy: bool,
    ) -> None:
        self._buffer, self._name, self._process_set = buffer, name, process_set
        self._compressor, self.lossy = compressor, lossy
        self._handle: Any = None
        self._context: Any = None

    def start(self, postscale: float) -> None:
        packed, self._context = self._compressor.compress(self._buffer)
        self._handle = allreduce_async_(
            packed.to(pick_wire_device(packed.device)),
            name=self._name,
            op=Sum,
            postscale_factor=postscale,
            process_set=self._process_set,
        )

    def finish(self) -> None:
        self._buffer.copy_(self._compressor.decompress(synchronize(self._handle), self._context))


class _Float32Compressor(Compressor):
    """Widens to float32, for dtypes that Horovod cannot add."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.to(torch.float32), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class _BFloat16Wire:
    """Two exchanges of bfloat16 bits with float32 additions between them.

    An all-reduce is a reduce-scatter followed by an all-gather. Here the reduce-scatter is an
    all-to-all of the 16-bit shards and a local sum in float32, so that a rank sends
    2 (N - 1) / N times the buffer in 16 bits, as a ring in bfloat16 would, and rounds twice.

    Source: Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
    """

    lossy = True

    def __init__(self, buffer: torch.Tensor, name: str, process_set: ProcessSet) -> None:
        self._buffer, self._name, self._process_set = buffer, name, process_set
        self._handle: Any = None
        self._postscale = 1.0

    def start(self, postscale: float) -> None:
        ranks = self._process_set.size()
        shard = -(-self._buffer.numel() // ranks)
        packed = torch.zeros(ranks * shard, dtype=torch.bfloat16, device=self._buffer.device)
        packed[: self._buffer.numel()].copy_(self._buffer)
        self._postscale = postscale
        self._handle = alltoall_async(
            packed.to(pick_wire_device(packed.device)).view(
                torch.float16
            ),  # the bits only: Horovod never adds them
            splits=torch.full((ranks,), shard, dtype=torch.int32),
            name=f"{self._name}.exchange",
            process_set=self._process_set,
        )

    def finish(self) -> None:
        received, _ = synchronize(self._handle)
        shards = received.view(torch.bfloat16).view(self._process_set.size(), -1)
        total = shards.sum(dim=0, dtype=torch.float32).mul_(self._postscale)
        self._handle = allgather_async(
            total.to(torch.bfloat16).view(torch.float16),
            name=f"{self._name}.gather",
            process_set=self._process_set,
        )
        gathered = synchronize(self._handle).view(torch.bfloat16)
        self._buffer.copy_(gathered[: self._buffer.numel()])


def travels_as_it_is(tensor: torch.Tensor, compression: type[Compressor]) -> bool:
    """Whether Horovod can reduce ``tensor`` where it lies, without a copy."""
    return (
        compression is Compression.none
        and tensor.dtype in _REDUCIBLE
        and pick_wire_device(tensor.device) == tensor.device
    )


def make_wire(
    buffer: torch.Tensor, name: str, process_set: ProcessSet, compression: type[Compressor]
) -> Wire:
    """Choose the wire for a flat real ``buffer`` of a floating dtype.

    Args:
        name: The operation's name, the same on every rank and unlike any other in flight.
        compression: One of ``Compression``, or a class of the user's with ``compress`` and
            ``decompress``, which then sees the whole flat buffer.
    """
    if compression is Compression.bf16:
        return _BFloat16Wire(buffer, name, process_set)
    if compression is Compression.none:
        if travels_as_it_is(buffer, compression):
            return _DirectWire(buffer, name, process_set)
        if buffer.dtype not in _REDUCIBLE:
            return _CompressedWire(buffer, name, process_set, _Float32Compressor, lossy=False)
        # A Horovod without GPU support takes tensors of the CPU.
        return _CompressedWire(buffer, name, process_set, compression, lossy=False)
    return _CompressedWire(buffer, name, process_set, compression, lossy=True)
