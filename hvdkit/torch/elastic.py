"""Horovod's elastic training; an optimizer's state is synchronized as elsewhere in hvdkit.

Horovod would take an optimizer step to create the state that it then broadcasts, which moves
the weights, and ranks that have a state already would not take part.
"""

from typing import Any

import torch
from horovod.torch.elastic import ElasticSampler, TorchState, run
from horovod.torch.elastic.state import (
    OptimizerStateHandler,
    get_handler_registry,
    set_handler_registry,
)

from hvdkit.torch.initial_state import broadcast_optimizer_state

__all__ = ["ElasticSampler", "TorchState", "run"]


class _OptimizerHandler(OptimizerStateHandler):  # type: ignore[misc, unused-ignore]
    value: Any

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


set_handler_registry(
    [(torch.optim.Optimizer, _OptimizerHandler)]
    + [pair for pair in get_handler_registry() if pair[0] is not torch.optim.Optimizer]
)
