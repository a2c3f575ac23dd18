"""Gradients over all ranks: a few large all-reduces instead of one for each variable."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from hvdkit.buckets import plan_buckets, split_evenly
from hvdkit.env import is_elastic
from hvdkit.keras.backend import allreduce_tensors, cast, hvd, keep_as_written, make_dense
from hvdkit.keras.layout import Gradient, agree_on_layout, describe_gradients

__all__ = ["ReductionOptions", "reduce_gradients"]


# Types that Horovod adds; others travel as float32.
_REDUCIBLE = {"float16", "float32", "float64"}


@dataclass(frozen=True, eq=False)
class ReductionOptions:
    """What ``DistributedOptimizer`` was asked for; equal on all ranks.

    Attributes:
        name: Prefix of all operation names, unlike any other optimizer's.
        op: ``hvd.Average`` or ``hvd.Sum``.
        process_set: The ranks to reduce over.
        compression: A class with ``compress`` and ``decompress``.
        gradient_predivide_factor: With ``Average``, what is divided by before the sum.
        groups: How many buckets, or lists of variables that share one; None for buckets by
            size.
        bucket_bytes: Size of a bucket.
        sparse_as_dense: Reduce ``IndexedSlices`` as dense tensors.
    """

    name: str
    op: Any
    process_set: Any
    compression: Any
    gradient_predivide_factor: float
    groups: int | list[list[Any]] | None
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
        if isinstance(self.groups, list):
            if not all(isinstance(group, list) for group in self.groups):
                raise ValueError("groups must be a number, or a list of lists of variables")
        elif self.groups is not None and self.groups < 1:
            raise ValueError(f"groups must be at least 1, not {self.groups}")
        if not hasattr(self.compression, "compress"):
            raise TypeError("compression must be hvd.Compression.none, fp16 or a class alike")

    def describe(self) -> list[tuple[str, str]]:
        """What must be equal on all ranks, as labels and texts."""
        values = [
            ("op", int(self.op)),
            ("compression", self.compression.__name__),
            ("gradient_predivide_factor", self.gradient_predivide_factor),
            ("groups", self._describe_groups()),
            ("bucket_size_mb", self.bucket_bytes / (1 << 20)),
            ("sparse_as_dense", self.sparse_as_dense),
        ]
        return [(label, str(value)) for label, value in values]

    def _describe_groups(self) -> Any:
        if not isinstance(self.groups, list):
            return self.groups
        return [[tuple(variable.shape) for variable in group] for group in self.groups]

    def factors(self) -> dict[str, Any]:
        """Return the operation and the factors before and after it."""
        if self.op == hvd.Sum:
            return {"op": hvd.Sum, "prescale_factor": 1.0, "postscale_factor": 1.0}
        if is_elastic():
            # A traced function outlives the number of ranks; Horovod divides by the current one.
            return {
                "op": hvd.Average,
                "prescale_factor": 1.0 / self.gradient_predivide_factor,
                "postscale_factor": self.gradient_predivide_factor,
            }
        ranks = self.process_set.size()
        if self.gradient_predivide_factor == 1.0:
            # Divided before the sum: nothing overflows that the mean itself does not.
            return {"op": hvd.Sum, "prescale_factor": 1.0 / ranks, "postscale_factor": 1.0}
        return {
            "op": hvd.Sum,
            "prescale_factor": 1.0 / self.gradient_predivide_factor,
            "postscale_factor": self.gradient_predivide_factor / ranks,
        }


@keep_as_written
def reduce_gradients(
    gradients: Sequence[Any],
    options: ReductionOptions,
    variables: Sequence[Any] = (),
    guard: Any = None,
) -> list[Any]:
    """Reduce gradients over all ranks; works inside and outside of ``tf.function``.

    Dense gradients of one dtype are laid end to end in buckets, those of the last variables
    first, since a backward pass comes to them first; a gradient of half a bucket or more
    travels alone, without the copy. ``IndexedSlices`` are gathered.

    Collective: every rank must call, with gradients of the same shapes and dtypes.

    Args:
        gradients: Tensors of the backend, no None.
        options: How.
        variables: One for each gradient; what groups of variables refer to.
        guard: An ``UpdateGuard`` that is shown what is sent and received.

    Returns:
        The reduced gradients, in the same order, dtypes and shapes.

    Raises:
        RankDisagreementError: Ranks have other gradients or options, found when they first
            meet these.
    """
    results = list(gradients)
    overwriting = [
        index
        for index, variable in enumerate(variables)
        if getattr(variable, "overwrite_with_gradient", False)
    ]
    if overwriting:
        rest = [index for index in range(len(results)) if index not in overwriting]
        reduced = _take_largest([results[index] for index in overwriting], options)
        if rest:
            reduced += reduce_gradients(
                [results[index] for index in rest],
                options,
                [variables[index] for index in rest],
                guard,
            )
        for index, gradient in zip(overwriting + rest, reduced, strict=True):
            results[index] = gradient
        return results
    if options.sparse_as_dense:
        results = [make_dense(gradient) for gradient in results]
    layout = describe_gradients(results)
    agree_on_layout(layout, options.describe(), options.process_set)
    name, buckets = _plan(
        layout, _find_groups(variables, options.groups), options.bucket_bytes, options.name
    )
    kinds = [[layout[index] for index in bucket] for bucket in buckets]
    sent, contexts = [], []
    for bucket, kind in zip(buckets, kinds, strict=True):
        packed, context = _to_wire([results[index] for index in bucket]), None
        if not kind[0].sparse:
            packed, context = options.compression.compress(packed)
        sent.append(packed)
        contexts.append(context)
    if guard is not None:
        guard.note_sent(sent)
    names = [f"{name}.{number}" for number in range(len(sent))]
    received = allreduce_tensors(sent, names, process_set=options.process_set, **options.factors())
    if guard is not None:
        guard.note_received(received)
    for bucket, kind, result, context in zip(buckets, kinds, received, contexts, strict=True):
        if not kind[0].sparse:
            result = options.compression.decompress(result, context)
        for index, piece in zip(bucket, _from_wire(result, kind), strict=True):
            results[index] = piece
    return results


def _take_largest(values: list[Any], options: ReductionOptions) -> list[Any]:
    """Return the largest that any rank has of values that overwrite a variable of theirs.

    They are scales and histories of largest values, of layers that compute in float8. A mean
    would be too small for the ranks with larger values; Keras takes the largest when it
    accumulates.
    """
    kinds = list(describe_gradients(values))
    packed = _to_wire([cast(ops.reshape(value, (-1,)), "float32") for value in values])
    name = f"{options.name}.overwrite.{zlib.crc32(repr(kinds).encode()):08x}"
    [largest] = allreduce_tensors([packed], [name], process_set=options.process_set, op=hvd.Max)
    ends = list(itertools.accumulate(kind.count for kind in kinds))
    return [
        cast(ops.reshape(piece, kind.shape), kind.dtype)
        for piece, kind in zip(ops.split(largest, ends[:-1]), kinds, strict=True)
    ]


def _find_groups(variables: Sequence[Any], groups: Any) -> tuple[int, ...] | int | None:
    """Return the group of each variable, -1 for one that is in none."""
    if not isinstance(groups, list):
        return groups
    numbers = {id(variable): i for i, group in enumerate(groups) for variable in group}
    return tuple(numbers.get(id(variable), -1) for variable in variables)


@functools.lru_cache(maxsize=256)
def _plan(
    layout: tuple[Gradient, ...],
    groups: tuple[int, ...] | int | None,
    bucket_bytes: int,
    prefix: str,
) -> tuple[str, list[list[int]]]:
    """Return a name, the same on every rank whatever it reduced before, and the buckets."""
    name = f"{prefix}.{zlib.crc32(repr(layout).encode()):08x}"
    free = [i for i, one in enumerate(layout) if not one.sparse and one.shape is not None]
    free.reverse()
    if isinstance(groups, tuple):
        members = [[i for i in free if groups[i] == group] for group in sorted(set(groups) - {-1})]
        buckets = members + [[i] for i in free if groups[i] == -1]
    elif groups is not None:
        buckets = [[free[i] for i in run] for run in split_evenly(len(free), groups)]
    else:
        large = [i for i in free if 2 * layout[i].size_bytes >= bucket_bytes]
        small = [i for i in free if 2 * layout[i].size_bytes < bucket_bytes]
        plan = plan_buckets(
            [layout[i].size_bytes for i in small],
            [layout[i].dtype for i in small],
            bucket_bytes=bucket_bytes,
        )
        buckets = [[i] for i in large] + [[small[i] for i in bucket] for bucket in plan]
    buckets = [
        [i for i in bucket if layout[i].dtype == dtype]
        for bucket in buckets
        for dtype in dict.fromkeys(layout[i].dtype for i in bucket)
    ]
    return name, buckets + [[i] for i in range(len(layout)) if i not in set(free)]


def _to_wire(gradients: list[Any]) -> Any:
    dtype = keras.backend.standardize_dtype(gradients[0].dtype)
    if dtype.startswith("complex"):
        raise TypeError(f"gradients of {dtype} cannot be reduced; split real and imaginary parts")
    if dtype not in _REDUCIBLE:
        gradients = [cast(gradient, "float32") for gradient in gradients]
    if len(gradients) == 1:
        return gradients[0]
    return ops.concatenate([ops.reshape(gradient, (-1,)) for gradient in gradients])


def _from_wire(result: Any, kinds: list[Gradient]) -> list[Any]:
    result = cast(result, kinds[0].dtype)
    if len(kinds) == 1:
        return [result]
    ends = list(itertools.accumulate(kind.count for kind in kinds))
    pieces = ops.split(result, ends[:-1])
    return [ops.reshape(piece, kind.shape) for piece, kind in zip(pieces, kinds, strict=True)]
