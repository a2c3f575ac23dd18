"""Which samples of a dataset belong to which rank, in which order, and from where on.

An epoch is one order of the whole dataset, the same on every rank. Its *global position* i goes
to rank ``i % workers``, so the workers' batches of one step are together the batch that a single
process would take. A run that stopped at a global position goes on there, with any number of
workers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from hvdkit.errors import HvdkitError

__all__ = [
    "check_shardable",
    "count_samples",
    "find_length",
    "order_epoch",
    "shard_indices",
    "shard_positions",
]


def check_shardable(length: int, workers: int) -> None:
    """Raise unless every worker can get at least one sample of its own.

    Raises:
        HvdkitError: If there are no workers, or fewer samples than workers.
    """
    if workers < 1:
        raise HvdkitError(f"the number of workers must be at least 1, got {workers}")
    if length < workers:
        raise HvdkitError(
            f"the dataset has {length} samples, fewer than the {workers} workers; "
            "use fewer workers or more data"
        )


def find_length(shapes: Iterable[Sequence[int]]) -> int:
    """Return the first dimension that all shapes have in common.

    Raises:
        HvdkitError: If they differ, one has none, or there are no shapes.
    """
    lengths = {shape[0] if len(shape) else -1 for shape in shapes}
    if len(lengths) != 1 or -1 in lengths:
        raise HvdkitError(f"arrays of one length are needed, found lengths {sorted(lengths)}")
    return int(lengths.pop())


def order_epoch(length: int, *, seed: int, epoch: int, shuffle: bool = True) -> Sequence[int]:
    """Return the order in which an epoch visits the samples ``0 .. length - 1``.

    It depends on the arguments alone, so every rank computes the same one.
    """
    if not shuffle:
        return range(length)
    order = list(range(length))
    # A string seed is hashed whole: neighbouring (seed, epoch) pairs are unrelated.
    random.Random(f"hvdkit {seed} {epoch}").shuffle(order)
    return order


def count_samples(length: int, workers: int, *, start: int = 0, drop_last: bool = False) -> int:
    """Return how many samples each rank gets between global position ``start`` and the end.

    The same number on every rank: rounded up (the last ones are then repeats, see
    ``shard_positions``) or, with ``drop_last``, down.

    Raises:
        HvdkitError: If ``start`` is negative, or as in ``check_shardable``.
    """
    check_shardable(length, workers)
    if start < 0:
        raise HvdkitError(f"a position in an epoch is at least 0, got {start}")
    left = max(0, length - start)
    return left // workers if drop_last else -(-left // workers)


def shard_positions(
    length: int, rank: int, workers: int, *, start: int = 0, drop_last: bool = False
) -> range:
    """Return the global positions of one rank from ``start`` on.

    Positions of ``length`` and above are padding: they wrap round to the epoch's first samples
    (see ``shard_indices``) so that no rank has a step less than another.

    Raises:
        HvdkitError: If ``rank`` is not in ``0 .. workers - 1``, or as in ``count_samples``.
    """
    count = count_samples(length, workers, start=start, drop_last=drop_last)
    if not 0 <= rank < workers:
        raise HvdkitError(f"the rank must be between 0 and {workers - 1}, got {rank}")
    first = start + rank
    return range(first, first + count * workers, workers)


def shard_indices(order: Sequence[int], positions: range) -> list[int]:
    """Return the samples at some global positions of an epoch's ``order``, wrapping round."""
    return [order[position % len(order)] for position in positions]
