"""Learners of the tasks in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdkit.bench.tasks import CONTEXT, Data

__all__ = ["Learner"]

MOMENTUM = 0.9


class Learner:
    """A fresh model that learns a task with all workers. Collective: every rank must make one."""

    def __init__(self, hvd: Any, task: str, data: Data, learning_rate: float, seed: int) -> None:
        """Begin with weights drawn by ``seed``; ``hvd`` is the adapter, initialized."""
        torch.manual_seed(seed)
        self._net = _NETS[task]()
        self._data = [
            torch.from_numpy(array)
            for array in (data.inputs, data.labels, data.held_out_inputs, data.held_out_labels)
        ]
        optimizer = torch.optim.SGD(self._net.parameters(), lr=learning_rate, momentum=MOMENTUM)
        self._optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=self._net.named_parameters()
        )
        hvd.broadcast_initial_state(self._net, self._optimizer)

    def learn(self, indices: Any) -> None:
        """Take one step on these samples. Collective."""
        inputs, labels, *_ = self._data
        rows = torch.as_tensor(indices)
        self._optimizer.zero_grad()
        functional.cross_entropy(self._net(inputs[rows]), labels[rows]).backward()
        self._optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the accuracy on the held-out samples."""
        *_, inputs, labels = self._data
        return float((self._net(inputs).argmax(1) == labels).float().mean())


def _make_digits() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _make_text() -> nn.Module:
    """Bengio et al., A Neural Probabilistic Language Model (2003), over bytes."""
    wide = CONTEXT * 32
    layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(wide, 256), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(256, 256))


_NETS = {"digits": _make_digits, "text": _make_text}
