"""``init``: Horovod's, after settings that suit buckets."""

from __future__ import annotations

from typing import Any

from hvdkit.env import check_launch, explain_failed_init
from hvdkit.keras.backend import hvd
from hvdkit.tuning import prefer_settings

__all__ = ["init"]


def init(*args: Any, **kwargs: Any) -> None:
    """Initialize Horovod; takes what Horovod's ``init`` takes.

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
    check_launch(mpi_built=hvd.mpi_built())
    prefer_settings()
    with explain_failed_init():
        hvd.init(*args, **kwargs)
