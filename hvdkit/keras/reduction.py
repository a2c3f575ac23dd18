"""Gradients over all ranks: a few large all-reduces instead of one for each variable."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from hvdkit.buckets import plan_buckets, split_evenly
from hvdkit.keras.backend import allreduce_tensors, hvd, is_sparse, is_tensorflow, make_dense

__all__ = ["DEFAULT_BUCKET_SIZE_MB", "ReductionOptions", "reduce_gradients"]

DEFAULT_BUCKET_SIZE_MB = 8.0

# Types that Horovod adds; others travel as float32.
_REDUCIBLE = {"float16", "float32", "float64"}


@dataclass
class ReductionOptions:
    """What ``DistributedOptimizer`` was asked for; equal on all ranks.

    Attributes:
        name: Prefix of all operation names, unlike any other optimizer's.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: The ranks to reduce over.
        compression: A class with ``compress`` and ``decompress``.
        gradient_predivide_factor: With ``Average``, what is divided by before the sum.
        groups: How many buckets, instead of buckets by size; or None.
        bucket_bytes: Size of a bucket.
        sparse_as_dense: Reduce ``IndexedSlices`` as dense tensors.
    """

    name: str
    op: Any
    process_set: Any
    compression: Any
    gradient_predivide_factor: float
    groups: int | None
    bucket_bytes: int
    sparse_as_dense: bool

    def validate(self) -> None:
        """Raise ValueError or TypeError for an option that is out of range."""
        if self.op not in (hvd.Average, hvd.Sum):
            raise ValueError("op must be hvd.Average or hvd.Sum; Keras has no others here")
        if not self.gradient_predivide_factor > 0:
            raise ValueError("gradient_predivide_factor must be positive")
        if self.gradient_predivide_factor != 1.0 and self.op != hvd.Average:
            raise ValueError("gradient_predivide_factor goes with op=Average only")
        if self.bucket_bytes < 1:
            raise ValueError("bucket_size_mb must be positive")
        if self.groups is not None and self.groups < 1:
            raise ValueError(f"groups must be at least 1, not {self.groups}")
        if not hasattr(self.compression, "compress"):
            raise TypeError("compression must be hvd.Compression.none, fp16 or a class alike")

    def describe(self) -> list[tuple[str, str]]:
        """What must be equal on all ranks, as labels and texts."""
        values = [
            ("op", int(self.op)),
            ("compression", self.compression.__name__),
            ("gradient_predivide_factor", self.gradient_predivide_factor),
            ("groups", self.groups),
            ("bucket_size_mb", self.bucket_bytes / (1 << 20)),
            ("sparse_as_dense", self.sparse_as_dense),
        ]
        return [(label, str(value)) for label, value in values]

    def scales(self) -> dict[str, float]:
        """Return the factors before and after the sum."""
        if self.op == hvd.Sum:
            return {"prescale_factor": 1.0, "postscale_factor": 1.0}
        ranks = self.process_set.size()
        if self.gradient_predivide_factor == 1.0:
            # Divided before the sum: nothing overflows that the mean itself does not.
            return {"prescale_factor": 1.0 / ranks, "postscale_factor": 1.0}
        return {
            "prescale_factor": 1.0 / self.gradient_predivide_factor,
            "postscale_factor": self.gradient_predivide_factor / ranks,
        }


def reduce_gradients(gradients: Sequence[Any], options: ReductionOptions) -> list[Any]:
    """Reduce gradients over all ranks; works inside and outside of ``tf.function``.

    Dense gradients of one dtype are laid end to end in buckets, those of the last variables
    first, since a backward pass comes to them first; a gradient of half a bucket or more
    travels alone, without the copy. ``IndexedSlices`` are gathered.

    Collective: every rank must call, with gradients of the same shapes and dtypes.

    Args:
        gradients: Tensors of the backend, no None.

    Returns:
        The reduced gradients, in the same order, dtypes and shapes.
    """
    results = list(gradients)
    if options.sparse_as_dense:
        results = [make_dense(gradient) for gradient in results]
    dense = [index for index, g in enumerate(results) if not is_sparse(g)]
    plan = _plan([results[index] for index in reversed(dense)], options)
    buckets = [[dense[-1 - position] for position in bucket] for bucket in plan]

    sent, contexts, names = [], [], []
    for number, bucket in enumerate(buckets):
        packed, context = options.compression.compress(_pack([results[i] for i in bucket]))
        sent.append(packed)
        contexts.append(context)
        names.append(f"{options.name}.bucket.{number}")
    for index in itertools.filterfalse(set(dense).__contains__, range(len(results))):
        buckets.append([index])
        sent.append(results[index])
        contexts.append(None)
        names.append(f"{options.name}.sparse.{index}")

    received = allreduce_tensors(sent, names, process_set=options.process_set, **options.scales())
    for bucket, result, context in zip(buckets, received, contexts, strict=True):
        if is_sparse(result):
            results[bucket[0]] = result
            continue
        flat = options.compression.decompress(result, context)
        for index, piece in zip(bucket, _unpack(flat, [results[i] for i in bucket]), strict=True):
            results[index] = piece
    return results


def _plan(gradients: list[Any], options: ReductionOptions) -> list[list[int]]:
    keys = [_dtype(gradient) for gradient in gradients]
    sizes = [_count(g) * _itemsize(key) for g, key in zip(gradients, keys, strict=True)]
    if options.groups is not None:
        runs = split_evenly(len(gradients), options.groups)
        return [
            [index for index in run if keys[index] == key]
            for run in runs
            for key in dict.fromkeys(keys[index] for index in run)
        ]
    alone = [index for index, size in enumerate(sizes) if 2 * size >= options.bucket_bytes]
    rest = sorted(set(range(len(gradients))) - set(alone))
    plan = plan_buckets(
        [sizes[i] for i in rest], [keys[i] for i in rest], bucket_bytes=options.bucket_bytes
    )
    return [[index] for index in alone] + [[rest[i] for i in bucket] for bucket in plan]


def _pack(gradients: list[Any]) -> Any:
    wire = _dtype(gradients[0])
    if wire not in _REDUCIBLE:
        gradients = [ops.cast(gradient, "float32") for gradient in gradients]
    if len(gradients) == 1:
        return gradients[0]
    return ops.concatenate([ops.reshape(gradient, (-1,)) for gradient in gradients])


def _unpack(flat: Any, like: list[Any]) -> list[Any]:
    dtype = _dtype(like[0])
    if _dtype(flat) != dtype:
        flat = ops.cast(flat, dtype)
    if len(like) == 1:
        return [flat]
    ends = list(itertools.accumulate(_count(gradient) for gradient in like))
    pieces = ops.split(flat, ends[:-1])
    return [ops.reshape(p, ops.shape(g)) for p, g in zip(pieces, like, strict=True)]


def _dtype(tensor: Any) -> str:
    return keras.backend.standardize_dtype(tensor.dtype)


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _count(tensor: Any) -> int:
    shape = tensor.shape
    if is_tensorflow() and not shape.is_fully_defined():
        raise ValueError(f"a gradient of unknown shape {shape} cannot be reduced")
    count = 1
    for length in shape:
        count *= int(length)
    return count
