"""Trains a small net in an elastic job, dies where it is told to, and counts every sample.

``ELASTIC_SIZES``: the numbers of workers to have trained with before the run may end;
``ELASTIC_PASSES``: of a step, to begin with; if more than one, the batch of a step is kept.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import hvdkit.torch as hvd
from tests.system.elastic_worker import HOST, Doom, Watch, report

SAMPLES = 96
BATCH = 4
MOST_EPOCHS = 400
SIZES = [int(size) for size in os.environ["ELASTIC_SIZES"].split(",")]
PASSES = int(os.environ.get("ELASTIC_PASSES", "1"))
WIDTH = int(os.environ.get("ELASTIC_WIDTH", "16"))

doom = Doom()


def make_model() -> nn.Module:
    """A net with dropout-free layers of ``WIDTH``; wide ones make for long reductions."""
    return nn.Sequential(
        nn.Linear(SAMPLES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 1),
    )


def digest(model: nn.Module) -> str:
    """Return a digest of the weights."""
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    hvd.init()
    torch.manual_seed(hash(HOST) % 1000)  # every worker another start
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=hvd.scale_learning_rate(0.01), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        backward_passes_per_step=PASSES,
        average_aggregated_gradients=True,
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10**6)
    sampler = hvd.shard(range(SAMPLES), seed=3)
    store = hvd.CheckpointStore(Path(os.environ["HVDKIT_TEST_RESULTS"], "checkpoints"), keep=2)
    state = hvd.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        schedule=schedule,
        learning_rate_rule="linear",
        keep_global_batch=PASSES > 1,
        **Watch.initial(),
    )

    def restore() -> None:
        doom.strikes("restart", state.step)
        type(state).restore(state)

    state.restore = restore
    model[1].register_forward_hook(lambda *_: doom.strikes("forward", state.step))
    model[2].register_full_backward_hook(lambda *_: doom.strikes("backward", state.step))

    def step(window: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        for numbers in window:
            loss = model(torch.eye(SAMPLES)[numbers]).square().mean()
            doom.strikes("reduction", state.step)
            loss.backward()
        doom.strikes("update", state.step)
        optimizer.step()
        schedule.step()
        doom.strikes("gather", state.step)
        numbers = torch.cat(window)
        samples = hvd.allgather(numbers, name="numbers").tolist()
        Watch.note(state, samples, hvd.size())
        state.sampler.advance(len(numbers))
        doom.strikes("saving", state.step)
        store.save(state.step, model, optimizer)
        doom.strikes("commit", state.step)
        state.commit()
        doom.strikes("pause", state.step)
        time.sleep(0.01)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        saved = store.load()  # before the barrier behind which rank 0 writes again
        # Whoever wrote it was lost a moment before or after the commit of the same step.
        assert abs((saved["step"] if saved else 0) - state.step) <= 1, state.step
        hvd.check_replicas(model)
        size = hvd.size()
        passes, rate = optimizer.backward_passes_per_step, optimizer.param_groups[0]["lr"]
        report(f"size-{size}-{len(state.sizes)}", step=state.step, passes=passes, rate=rate)
        loader = DataLoader(range(SAMPLES), batch_size=BATCH, sampler=state.sampler)
        for epoch in range(state.sampler.epoch, MOST_EPOCHS):
            if len(state.seen) >= SAMPLES:
                Watch.end_epoch(state, SAMPLES)
            if state.sizes[-len(SIZES) :] == SIZES and not state.seen:
                break
            state.sampler.set_epoch(epoch)
            window = []
            for index, numbers in enumerate(loader, 1):
                window.append(numbers)
                if len(window) == passes or index == len(loader):
                    step(window)
                    window = []
        hvd.check_replicas(model)

    train(state)
    report(
        f"done-{HOST}",
        digest=digest(model),
        sizes=state.sizes,
        epochs=state.epochs,
        size=hvd.size(),
        rates=[optimizer.param_groups[0]["lr"], *schedule.base_lrs],
    )


if __name__ == "__main__":
    main()
