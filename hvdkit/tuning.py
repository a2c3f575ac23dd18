"""Settings that suit many workers: Horovod's, for flat buckets, and threads a worker."""

import os
import warnings
from collections.abc import MutableMapping

from hvdkit.settings import read_settings

__all__ = [
    "FUSION_THRESHOLD_BYTES",
    "STALL_LIMIT_S",
    "prefer_settings",
    "say_too_few_gpus",
    "share_cores",
    "warn_of_too_many_threads",
]

# Horovod copies whatever is ready at the same time into a buffer of its own and back, up to
# 128 MB by default. Buckets are large enough to travel alone, in place; small operations still
# gain from travelling together.
FUSION_THRESHOLD_BYTES = 1 << 20

# A rank that has not taken part in an operation for that long ends the job; Horovod would only
# warn, and wait for ever.
STALL_LIMIT_S = 60


def prefer_settings(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what Horovod will read when it is initialized, unless the user has set it.

    ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` becomes 60: how long ranks wait for one that does not
    take part in an operation before the job ends with an error that names it (0: for ever).
    The cycle time is the one that ``hvdkit bench allreduce --write-config`` has saved, if any.

    Args:
        environ: The environment to change; all ranks must start with equal settings of Horovod.

    Raises:
        HvdkitError: The saved settings are damaged.
    """
    environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(STALL_LIMIT_S))
    if environ.get("HOROVOD_AUTOTUNE", "0") == "0":
        environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_THRESHOLD_BYTES))
        cycle_time_ms = read_settings(environ).cycle_time_ms
        if cycle_time_ms is not None:
            environ.setdefault("HOROVOD_CYCLE_TIME", str(cycle_time_ms))


def share_cores(workers: int) -> int:
    """Return how many of the cores that this process may run on fall to each of ``workers``."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def warn_of_too_many_threads(threads: int, workers: int) -> None:
    """Warn the caller's caller if ``workers`` with ``threads`` each are more than the cores."""
    cores = len(os.sched_getaffinity(0))
    if workers * threads > cores:
        remedy = " or lower OMP_NUM_THREADS" if threads > 1 else ""
        warnings.warn(
            f"{workers} workers with {threads} threads each share {cores} cores: steps slow down "
            f"when threads wait for a core; start fewer workers{remedy}",
            RuntimeWarning,
            stacklevel=3,
        )


def say_too_few_gpus(workers: int, gpus: int, framework: str) -> str:
    """Say what to do on a host where ``framework`` sees fewer GPUs than there are workers."""
    if gpus == 0:
        return (
            f"{framework} sees no GPU on this host: install its GPU build, check the driver and "
            "CUDA_VISIBLE_DEVICES, or ask for the CPU"
        )
    return (
        f"{workers} workers run on this host but {framework} sees {gpus} GPUs: "
        f"start at most {gpus} workers here, or ask for the CPU"
    )
