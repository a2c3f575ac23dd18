"""The fusion plan: which tensors share which all-reduce.

Both frameworks use it, so it knows sizes and keys only, no tensors.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 4.2: buckets are filled in the order in which gradients become ready, and
the first one is small so that communication starts early.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

__all__ = ["FIRST_BUCKET_BYTES", "plan_buckets", "split_evenly"]

FIRST_BUCKET_BYTES = 1 << 20


def plan_buckets(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[int]]:
    """Group tensors, given in the order in which they become ready, into buckets.

    Tensors share a bucket only when their keys (dtype and device, say) are equal. A tensor is
    never split: one that is larger than the limit closes the bucket that it joins.

    Args:
        sizes_bytes: Size of each tensor in bytes.
        keys: What tensors must have in common to share a bucket.
        bucket_bytes: A bucket is closed when it holds at least this much.
        first_bucket_bytes: The same for the first bucket that is closed.

    Returns:
        Lists of indices into ``sizes_bytes``, in the order in which buckets become ready.

    Raises:
        ValueError: The arguments differ in length, or a limit is not positive.
    """
    if len(sizes_bytes) != len(keys):
        raise ValueError(f"{len(sizes_bytes)} sizes but {len(keys)} keys; give one key a tensor")
    if bucket_bytes <= 0 or first_bucket_bytes <= 0:
        raise ValueError("a bucket's size must be positive")
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for index, (size, key) in enumerate(zip(sizes_bytes, keys, strict=True)):
        filling.setdefault(key, []).append(index)
        filled_bytes[key] = filled_bytes.get(key, 0) + size
        limit = bucket_bytes if closed else min(first_bucket_bytes, bucket_bytes)
        if filled_bytes[key] >= limit:
            closed.append(filling.pop(key))
            del filled_bytes[key]
    # What is left becomes ready with its last tensor.
    return closed + sorted(filling.values(), key=lambda bucket: bucket[-1])


def split_evenly(count: int, parts: int) -> list[list[int]]:
    """Split ``range(count)`` into at most ``parts`` runs whose lengths differ by at most one."""
    if parts <= 0:
        raise ValueError(f"the number of groups must be positive, not {parts}")
    short, longer = divmod(count, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + short + (part < longer))
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds) if b > a]
