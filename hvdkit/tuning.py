"""Horovod's settings that suit flat buckets; what the user has set stays."""

import os
from collections.abc import MutableMapping

__all__ = ["FUSION_THRESHOLD_BYTES", "prefer_settings"]

# Horovod copies whatever is ready at the same time into a buffer of its own and back, up to
# 128 MB by default. Buckets are large enough to travel alone, in place; small operations still
# gain from travelling together.
FUSION_THRESHOLD_BYTES = 1 << 20


def prefer_settings(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what Horovod will read when it is initialized, unless the user has set it.

    Args:
        environ: The environment to change; all ranks must start with equal settings of Horovod.
    """
    if environ.get("HOROVOD_AUTOTUNE", "0") == "0":
        environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_THRESHOLD_BYTES))
