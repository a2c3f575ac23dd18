"""Clipping by the norm of the reduced gradients, which is the same on every rank."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["clip_gradients"]


@torch.no_grad()
def clip_gradients(optimizer: Any, max_norm: float) -> None:
    """Scale all gradients of ``optimizer`` in place to a joint 2-norm of at most ``max_norm``.

    Sparse gradients must be coalesced. A norm that is not finite makes every gradient NaN, as
    ``torch.nn.utils.clip_grad_norm_`` does.
    """
    grads = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                sparse = param.grad.layout == torch.sparse_coo
                grads.append(param.grad._values() if sparse else param.grad)
    if not grads:
        return
    # A fused optimizer unscales only in its update: GradScaler leaves the scale here.
    scale = getattr(optimizer, "grad_scale", None)
    limit = max_norm if scale is None else max_norm * scale
    norm = torch.nn.utils.get_total_norm(grads)
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for device in {grad.device for grad in grads}:
        on_device = [grad for grad in grads if grad.device == device]
        torch._foreach_mul_(on_device, factor.to(device))
