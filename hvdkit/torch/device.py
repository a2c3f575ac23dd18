"""Where a worker computes: the GPU that its local rank pins, and its share of the cores."""

from __future__ import annotations

import os

import horovod.torch as _horovod
import torch

from hvdkit.errors import EnvironmentMismatchError
from hvdkit.tuning import say_too_few_gpus, share_cores, warn_of_too_many_threads

__all__ = ["pick_device", "set_threads"]


def pick_device(kind: str = "auto") -> torch.device:
    """Return this worker's device, and make it the current one if it is a GPU.

    Call it after ``init()``. Workers of one host get one GPU each, by local rank.

    Args:
        kind: ``"cuda"``, ``"cpu"``, or ``"auto"`` for a GPU where torch sees any.

    Raises:
        EnvironmentMismatchError: this host runs more workers than torch sees GPUs.
        ValueError: another ``kind``.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device kind must be 'auto', 'cpu' or 'cuda'; got {kind!r}")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus, local_rank, workers = torch.cuda.device_count(), _horovod.local_rank(), _count_workers()
    # Compare the counts, not this rank with the count, so that all workers of the host agree.
    if workers > gpus:
        raise EnvironmentMismatchError(say_too_few_gpus(workers, gpus, "torch"))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def set_threads(threads: int | None = None) -> int:
    """Set how many threads torch computes with in this worker; return the number.

    Call it after ``init()``. By default a worker gets its share of the cores that it may run on
    (cores over local size, at least one), unless ``OMP_NUM_THREADS`` already says otherwise.
    Local rank 0 warns when the workers of this host ask for more threads than there are cores.

    Raises:
        ValueError: ``threads`` below one.
    """
    workers = _count_workers()
    if threads is None:
        # With the variable set torch has followed it already.
        from_variable = os.environ.get("OMP_NUM_THREADS")
        threads = torch.get_num_threads() if from_variable else share_cores(workers)
    if threads < 1:
        raise ValueError(f"a worker needs at least 1 thread; got {threads}")
    torch.set_num_threads(threads)
    if _horovod.local_rank() == 0:
        warn_of_too_many_threads(threads, workers)
    return threads


def _count_workers() -> int:
    return int(_horovod.local_size())
