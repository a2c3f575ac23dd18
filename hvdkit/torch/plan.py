"""How gradients are reduced (the options) and in which buckets (the plan)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import Adasum, Average, ProcessSet, Sum

from hvdkit.buckets import plan_buckets, split_evenly
from hvdkit.errors import RankDisagreementError
from hvdkit.torch.agreement import find_difference
from hvdkit.torch.bucket import GradientBucket
from hvdkit.torch.collectives import allgather_object
from hvdkit.torch.direct import DirectGradient, Presence
from hvdkit.torch.hyper_parameters import ADVICE
from hvdkit.torch.round import Round
from hvdkit.torch.slot import Slot
from hvdkit.torch.sparse import SparseGradient
from hvdkit.torch.wire import travels_as_it_is

__all__ = ["EagerReduction", "LateReduction", "ReductionOptions", "make_plan"]

# Launched as soon as its gradients are ready; launched at the end of a round.
EagerReduction = GradientBucket | DirectGradient
LateReduction = SparseGradient | Presence

_UNUSED, _DENSE, _SPARSE = 0, 1, 2


@dataclass
class ReductionOptions:
    """What ``DistributedOptimizer`` was asked for; equal on all ranks."""

    op: Any
    process_set: ProcessSet
    compression: type[Compressor]
    backward_passes_per_step: int
    gradient_predivide_factor: float
    average_aggregated_gradients: bool
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    bucket_bytes: int
    sparse_as_dense: bool
    sparse_only: bool  # the optimizer takes sparse gradients alone
    # What else is compared when ranks first reduce together: it may differ until then.
    describe_optimizer: Callable[[], list[tuple[str, str]]] = list

    def validate(self) -> None:
        """Raise ValueError or TypeError for an option that is out of range."""
        if self.op not in (Average, Sum, Adasum):
            raise ValueError("op must be Average, Sum or Adasum; others make no gradient")
        if self.backward_passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step must be at least 1, not {self.backward_passes_per_step}"
            )
        if not self.gradient_predivide_factor > 0:
            raise ValueError("gradient_predivide_factor must be positive")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor goes with op=Average only")
        if self.bucket_bytes < 1:
            raise ValueError("bucket_size_mb must be positive")
        if not hasattr(self.compression, "compress"):
            raise TypeError("compression must be hvd.Compression.none, fp16, bf16 or a class alike")
        if isinstance(self.groups, int) and self.groups < 1:
            raise ValueError(f"groups must be at least 1, not {self.groups}")
        if self.groups is not None and not isinstance(self.groups, int):
            members = [param for group in self.groups for param in group]
            if not all(isinstance(param, torch.Tensor) for param in members):
                raise TypeError("groups must be a number or a list of lists of parameters")
            if len({id(param) for param in members}) < len(members):
                raise ValueError("a parameter may be in one of the groups only")

    def describe(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, str]]:
        """What must be equal on all ranks, as labels and texts.

        Args:
            named: The optimizer's parameters, which groups are described by.
        """
        groups: Any = self.groups
        if not isinstance(groups, int | None):
            names = {id(param): name for name, param in named}
            groups = [[names.get(id(param)) for param in group] for group in groups]
        values = [
            ("op", int(self.op)),
            ("compression", self.compression.__name__),
            ("backward_passes_per_step", self.backward_passes_per_step),
            ("gradient_predivide_factor", self.gradient_predivide_factor),
            ("average_aggregated_gradients", self.average_aggregated_gradients),
            ("groups", groups),
            ("bucket_size_mb", self.bucket_bytes / (1 << 20)),
            ("sparse_as_dense", self.sparse_as_dense),
        ]
        return [(label, str(value)) for label, value in values]

    @property
    def reopens(self) -> bool:
        """Whether a reduced gradient must be rescaled before a further pass adds to it."""
        return self.op == Sum or self.average_aggregated_gradients

    def round(self, *, ranks: int, active: bool, passes: int, reduced_passes: int) -> Round:
        """Work out what a reduction after ``passes`` backward passes multiplies by."""
        now = Round(mean=self.op == Average, active=active, ranks=ranks, reopens=self.reopens)
        if not now.mean:
            now.reopen = 1.0 / ranks
        elif self.gradient_predivide_factor == 1.0:
            # Divided before the sum: nothing overflows that the mean itself does not.
            now.scale = 1.0 / ranks
        else:
            now.scale = 1.0 / self.gradient_predivide_factor
            now.postscale = self.gradient_predivide_factor / ranks
        if self.average_aggregated_gradients:
            now.scale /= passes
            now.reopen *= reduced_passes
        return now


def make_plan(
    slots: list[Slot], ready_order: list[int], options: ReductionOptions, name: str
) -> tuple[list[EagerReduction], list[LateReduction]]:
    """Put parameters into buckets, in the order in which rank 0 saw their gradients.

    A gradient that makes up half a bucket travels alone.

    Collective: every rank of the process set must call.

    Args:
        slots: The parameters, in the same order on every rank.
        ready_order: Indices into ``slots`` as gradients became ready on this rank.
        options: Equal on all ranks.
        name: Prefix of the operations' names.

    Returns:
        What is reduced as soon as its gradients are ready, and what at the end of a round.

    Raises:
        RankDisagreementError: Names, shapes, strides or dtypes differ, or hyper-parameters do.
    """
    process_set = options.process_set
    _demand_equal_plans(slots, options, name)
    seen = allgather_object(
        (ready_order, [_describe(slot) for slot in slots]),
        name=f"{name}.seen",
        process_set=process_set,
    )
    order = _complete(next((order for order, _ in seen if order), []), len(slots))
    dense: list[Slot] = []
    direct: list[DirectGradient] = []
    late: list[LateReduction] = []
    for index in order:
        slot = slots[index]
        kinds = [kind for _, kinds_of_rank in seen if (kind := kinds_of_rank[index])]
        if (kinds or options.sparse_only) and all(kind >= _SPARSE for kind in kinds):
            slot.sparse_dim = kinds[0] - _SPARSE if kinds else 1
        if slot.sparse_dim is not None and not options.sparse_as_dense:
            late.append(SparseGradient(slot, f"{name}.sparse.{index}", process_set))
        elif _travels_alone(slot, options):
            direct.append(DirectGradient(slot, f"{name}.direct.{index}", process_set))
        else:
            dense.append(slot)
    buckets = [
        GradientBucket(members, f"{name}.bucket.{number}", process_set, options.compression)
        for number, members in enumerate(_group(dense, options))
    ]
    if direct:
        late.append(Presence(direct, f"{name}.presence", process_set))
    return [*direct, *buckets], late


def _demand_equal_plans(slots: list[Slot], options: ReductionOptions, name: str) -> None:
    described = options.describe_optimizer()
    layout = [
        (slot.name, slot.layout() + group)
        for slot, group in zip(slots, _name_groups(slots, options), strict=True)
    ]
    difference = find_difference(
        [*described, *layout], name=f"{name}.layout", process_set=options.process_set
    )
    if difference is None:
        return
    if difference.index < len(described):
        raise RankDisagreementError(
            f"The optimizer must be the same on every rank, but {difference}; {ADVICE}"
        )
    raise RankDisagreementError(
        f"The trainable parameters must be the same on every rank, but {difference}"
    )


def _name_groups(slots: list[Slot], options: ReductionOptions) -> list[str]:
    """Say in words in which of the listed groups each parameter is."""
    if options.groups is None or isinstance(options.groups, int):
        return [""] * len(slots)
    places = {
        id(param): f" in place {place} of group {number}"
        for number, group in enumerate(options.groups)
        for place, param in enumerate(group)
    }
    return [places.get(id(slot.param), " in no group") for slot in slots]


def _travels_alone(slot: Slot, options: ReductionOptions) -> bool:
    size_bytes = slot.param.numel() * slot.param.element_size()
    return (
        options.groups is None
        and slot.sparse_dim is None
        and 2 * size_bytes >= options.bucket_bytes
        and travels_as_it_is(slot.param, options.compression)
    )


def _describe(slot: Slot) -> int:
    grad = slot.param.grad
    if grad is None:
        return _UNUSED
    return _SPARSE + grad.sparse_dim() if grad.layout == torch.sparse_coo else _DENSE


def _complete(order: list[int], count: int) -> list[int]:
    """Append what was not seen, last parameter first, as a backward pass would come to it."""
    seen = set(order)
    return order + [index for index in reversed(range(count)) if index not in seen]


def _group(slots: list[Slot], options: ReductionOptions) -> list[list[Slot]]:
    keys = [(slot.param.dtype, slot.param.device) for slot in slots]
    sizes = [slot.param.numel() * slot.param.element_size() for slot in slots]
    if options.groups is None:
        planned = plan_buckets(sizes, keys, bucket_bytes=options.bucket_bytes)
    elif isinstance(options.groups, int):
        planned = [
            part for run in split_evenly(len(slots), options.groups) for part in _by_key(run, keys)
        ]
    else:
        position = {id(slot.param): index for index, slot in enumerate(slots)}
        planned = []
        for group in options.groups:
            run = [position.pop(id(param)) for param in group if id(param) in position]
            planned += _by_key(run, keys)
        rest = sorted(position.values())
        for part in plan_buckets(
            [sizes[i] for i in rest], [keys[i] for i in rest], bucket_bytes=options.bucket_bytes
        ):
            planned.append([rest[i] for i in part])
    return [[slots[index] for index in part] for part in planned]


def _by_key(run: list[int], keys: list[Any]) -> list[list[int]]:
    parts: dict[Any, list[int]] = {}
    for index in run:
        parts.setdefault(keys[index], []).append(index)
    return list(parts.values())
