"""Whether gradients are finite, at the price of one sum over each buffer.

A sum is NaN or infinite as soon as one of its terms is. It may also overflow over finite ones, so
a sum that is not finite is a suspicion only, which a look at each value confirms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

__all__ = ["are_finite", "get_values", "is_finite", "probe"]

# Below this a tensor costs more by the call than by its size.
_SMALL_NUMEL = 1 << 15


def get_values(grad: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a dense or sparse gradient, complex ones as pairs."""
    values = grad._values() if grad.layout == torch.sparse_coo else grad
    return torch.view_as_real(values) if values.is_complex() else values


def probe(values: torch.Tensor) -> torch.Tensor:
    """Return a number, on the tensor's device, that is not finite if one in ``values`` is not."""
    # Sums of float16 are added up in float32 anyway; so they do not overflow at the end.
    return values.sum(dtype=torch.float32) if values.dtype == torch.float16 else values.sum()


def are_finite(probes: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor]) -> bool:
    """Return False where a probe is not finite, or one of further gradients may not be.

    Waits for each device that they are on, once.
    """
    probes = list(probes)
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in gradients:
        values = get_values(grad)
        if values.numel() < _SMALL_NUMEL:
            small.setdefault((values.dtype, values.device), []).append(values)
        else:
            probes.append(probe(values))
    for (dtype, _), tensors in small.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        probes += torch._foreach_norm(tensors, 1, dtype=wide)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for one in probes:
        by_device.setdefault(one.device, []).append(one.double())
    return all(math.isfinite(torch.stack(ones).sum().item()) for ones in by_device.values())


def is_finite(grad: torch.Tensor) -> bool:
    """Whether every number of a gradient is finite."""
    return bool(torch.isfinite(get_values(grad)).all())
