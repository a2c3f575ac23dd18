"""``init``: Horovod's, after what makes training on it fast."""

from __future__ import annotations

from typing import Any

import horovod.torch as _horovod
import torch

from hvdkit import trace
from hvdkit.env import check_launch, explain_failed_init
from hvdkit.torch.collectives import gather_over
from hvdkit.tuning import prefer_settings

__all__ = ["init", "keep_freed_memory"]

# The largest block that glibc's malloc learns from (DEFAULT_MMAP_THRESHOLD_MAX), less its
# header and rounding.
_LARGEST_HEAP_BLOCK_BYTES = (32 << 20) - (64 << 10)


def init(*args: Any, **kwargs: Any) -> None:
    """Initialize Horovod; takes what ``horovod.torch.init`` takes.

    Unless the environment says otherwise, ``HOROVOD_FUSION_THRESHOLD`` is 1 MiB: buckets are
    reduced in place and not copied into Horovod's own buffer; and
    ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` is 60: a rank that misses an operation for that long
    ends the job with an error on all ranks, which names it.

    Collective: every rank must call.

    Raises:
        EnvironmentMismatchError: If ``HOROVOD_RANK`` and its like are there in part, or do not
            fit together.
        HvdkitError: If the workers do not find each other.
    """
    check_launch(mpi_built=_horovod.mpi_built())
    prefer_settings()
    keep_freed_memory()
    with explain_failed_init():
        _horovod.init(*args, **kwargs)
    gather = gather_over(_horovod.global_process_set)
    trace.start(_horovod.rank(), _horovod.size(), "torch", gather)


def keep_freed_memory() -> None:
    """Let glibc's malloc reuse the memory of gradients rather than return it to the kernel.

    A gradient that has been moved to its bucket is freed and the next one allocated. Until
    malloc has seen a block of that size freed it maps and unmaps pages each time, which costs
    as much as the copy. One freed block raises both of its limits; the pages stay untouched.

    Source: mallopt(3), M_MMAP_THRESHOLD, "dynamic mmap threshold".
    """
    torch.empty(_LARGEST_HEAP_BLOCK_BYTES, dtype=torch.uint8)
