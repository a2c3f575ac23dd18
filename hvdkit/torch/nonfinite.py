"""Which parameters' gradients are not finite: after their reduction, and before it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch

from hvdkit.torch.bucket import GradientBucket
from hvdkit.torch.direct import DirectGradient
from hvdkit.torch.finite import are_finite, is_finite
from hvdkit.torch.plan import EagerReduction, LateReduction
from hvdkit.torch.slot import Slot
from hvdkit.torch.sparse import SparseGradient

__all__ = ["find_nonfinite", "find_own_nonfinite"]


@torch.no_grad()
def find_nonfinite(slots: Collection[Slot], reductions: Iterable[EagerReduction]) -> list[str]:
    """Return the names of those whose gradients are NaN or infinite somewhere.

    Args:
        slots: The parameters looked at.
        reductions: What has reduced their gradients, or some of them: buffers are read whole.
    """
    probes: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for reduction in reductions:
        if isinstance(reduction, GradientBucket):
            found, elsewhere = reduction.probe_result()
            probes += found
            others += elsewhere
    others += [
        slot.param.grad
        for slot in slots
        if slot.param.grad is not None and not isinstance(slot.bucket, GradientBucket)
    ]
    if are_finite(probes, others):
        return []
    return [
        slot.name
        for slot in slots
        if slot.param.grad is not None and not is_finite(slot.param.grad)
    ]


def find_own_nonfinite(reductions: Iterable[EagerReduction | LateReduction]) -> set[str]:
    """Return the names of all that were sent together with a value of this rank's not finite."""
    found: set[str] = set()
    for reduction in reductions:
        if isinstance(reduction, GradientBucket | DirectGradient | SparseGradient):
            probe = reduction.local_probe
            if probe is not None and not math.isfinite(probe.item()):
                found |= {slot.name for slot in reduction.slots}
    return found
