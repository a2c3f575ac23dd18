"""Sparse gradients: rows and their indices are gathered from all ranks, never densified."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, allgather_async, synchronize

from hvdkit.torch.finite import get_values, probe
from hvdkit.torch.round import Round
from hvdkit.torch.slot import Slot, demand_trainable
from hvdkit.torch.transport import pick_wire_device

__all__ = ["SparseGradient"]


class SparseGradient:
    """The gradient of one parameter that arrives in COO layout.

    Collective: every rank must launch and finish it, once a round; a rank without a gradient
    sends no rows.
    """

    def __init__(self, slot: Slot, name: str, process_set: ProcessSet) -> None:
        self.slot, self.slots = slot, [slot]
        self.in_flight = False
        self.local_probe: torch.Tensor | None = None  # of what this rank sent last
        self._name, self._process_set = name, process_set
        self._handles: tuple[Any, Any] | None = None

    def launch(self, now: Round) -> None:
        """Start to gather this rank's rows."""
        param, sparse_dim = self.slot.param, self.slot.sparse_dim
        assert sparse_dim is not None
        grad = param.grad
        if grad is None or not now.active or not param.requires_grad:
            indices = torch.empty((0, sparse_dim), dtype=torch.int64, device=param.device)
            values = param.new_empty((0, *param.shape[sparse_dim:]))
        else:
            if grad.layout != torch.sparse_coo:
                grad = grad.to_sparse(sparse_dim)
            grad = grad.coalesce()
            factor = now.scale
            if self.slot.holds_result():
                factor *= now.reopen
            indices = grad.indices().t().contiguous()
            values = grad.values() * factor
        if now.probes:
            self.local_probe = probe(get_values(values))
        self.in_flight = True
        self._handles = (
            self._gather(indices, "indices"),
            self._gather(_as_reducible(values), "values"),
        )

    def finish(self, now: Round) -> None:
        """Wait; afterwards ``param.grad`` is the coalesced sum, or None if no rank had rows."""
        assert self._handles is not None
        param = self.slot.param
        self.in_flight = False
        indices = synchronize(self._handles[0]).to(param.device)
        values = synchronize(self._handles[1]).to(param.device)
        self._handles = None
        if values.dtype != param.dtype:
            values = values.view(param.dtype)
        if indices.shape[0] == 0:
            self.slot.accept(None)
        else:
            demand_trainable(self.slot)
            if now.postscale != 1.0:
                values = values * now.postscale
            total = torch.sparse_coo_tensor(
                indices.t(), values, param.shape, check_invariants=False
            )
            self.slot.accept(total.coalesce())

    def _gather(self, tensor: torch.Tensor, part: str) -> Any:
        return allgather_async(
            tensor.to(pick_wire_device(tensor.device)),
            name=f"{self._name}.{part}",
            process_set=self._process_set,
        )


def _as_reducible(values: torch.Tensor) -> torch.Tensor:
    """Only bits travel, so a dtype that Horovod lacks goes under one of the same width."""
    return values.view(torch.float16) if values.dtype == torch.bfloat16 else values
