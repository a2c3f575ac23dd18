"""All-reduces tensors as one candidate does, and checks every sum, for each request."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from hvdkit.bench.crew import TIMEOUT_S
from hvdkit.bench.worker import Seat, read_arguments, serve

__all__: list[str] = []

# Starts to sum tensors; what it returns waits for the sums, and returns them.
Sum = Callable[[list[Any]], Callable[[], list[Any]]]


def main() -> None:
    """Prepare what the arguments say, and time sums."""
    channel, seat, task = read_arguments(__doc__)
    torch.set_num_threads(task["threads"])
    start, close = _CANDIDATES[task["candidate"]](seat)
    factor = seat.rank + 1 if task["candidate"] == "copy" else sum(range(1, seat.size + 1))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        dtype = getattr(torch, request["dtype"])
        count = request["size_bytes"] // dtype.itemsize // request["tensors"]
        # Small whole numbers, other ones in neighbouring places: exact in every dtype.
        pattern = (torch.arange(count) % 5).to(dtype)
        tensors = [pattern.clone() for _ in range(request["tensors"])]
        expected = pattern * factor
        durations_s, wrong = [], 0
        for _ in range(request["operations"] + 1):
            for tensor in tensors:
                torch.mul(pattern, seat.rank + 1, out=tensor)
            start_s = time.perf_counter()
            finish = start(tensors)
            results = finish()
            durations_s.append(time.perf_counter() - start_s)
            wrong += any(not torch.equal(result, expected) for result in results)
        # The first absorbs what a resumed process finds cold.
        return {"durations_s": durations_s[1:], "wrong": wrong}

    serve(channel, {}, answer)
    close()


def _prepare_horovod(seat: Seat) -> tuple[Sum, Callable[[], None]]:
    hvd = importlib.import_module("hvdkit.torch")
    hvd.init()

    def start(tensors: list[Any]) -> Callable[[], Any]:
        if len(tensors) == 1:
            handle = hvd.allreduce_async_(tensors[0], op=hvd.Sum, name=f"sum {tensors[0].numel()}")
        else:
            name = f"sum {len(tensors)} of {tensors[0].numel()}"
            handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name=name)

        def finish() -> list[Any]:
            hvd.synchronize(handle)
            return tensors

        return finish

    return start, hvd.shutdown


def _prepare_torch(seat: Seat) -> tuple[Sum, Callable[[], None]]:
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{seat.addresses[0]}",
        rank=seat.rank,
        world_size=seat.size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )

    def start(tensors: list[Any]) -> Callable[[], Any]:
        works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]

        def finish() -> list[Any]:
            for work in works:
                work.wait()
            return tensors

        return finish

    return start, distributed.destroy_process_group


def _prepare_copy(seat: Seat) -> tuple[Sum, Callable[[], None]]:
    """No communication: how fast the ranks copy as many bytes, all at the same time."""
    target: list[Any] = []

    def start(tensors: list[Any]) -> Callable[[], Any]:
        if [(one.dtype, one.shape) for one in target] != [
            (one.dtype, one.shape) for one in tensors
        ]:
            target[:] = [torch.empty_like(tensor) for tensor in tensors]

        return lambda: [into.copy_(tensor) for into, tensor in zip(target, tensors, strict=True)]

    return start, lambda: None


_CANDIDATES = {
    "hvdkit": _prepare_horovod,
    "horovod": _prepare_horovod,
    "mpi": _prepare_horovod,
    "torch": _prepare_torch,
    "copy": _prepare_copy,
}


if __name__ == "__main__":
    main()
