"""A training run whose every random part counts, for checks of interrupted and resumed runs."""

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hvdkit.torch as hvd

SAMPLES, BATCH, EPOCHS = 66, 3, 3
STEPS_PER_EPOCH = 11  # with two workers


class Augmented(Dataset):
    """Samples that NumPy's and Python's generators change each time, and their indices."""

    def __init__(self):
        self.data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.from_numpy(np.random.standard_normal(8).astype(np.float32))
        sign = random.choice([-1, 1])
        return self.data[index] + 0.1 * sign * noise, index


def train(directory=None, *, save_every=4, kill_at=None, asynchronous=True, stop_at=None):
    """Train, from the checkpoint that is in ``directory`` if there is one.

    Args:
        directory: Of the store; None saves nothing.
        save_every: Steps.
        kill_at: This process kills itself in the middle of this step.
        asynchronous: As for ``CheckpointStore``.
        stop_at: Steps after which training returns.

    Returns:
        Loss of each step, indices of each step, and the state at the end, all of this rank.
    """
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(10 + hvd.rank())
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS_PER_EPOCH)
    dataset = Augmented()
    sampler = hvd.shard(dataset, seed=3)
    loader = DataLoader(dataset, BATCH, sampler=sampler, generator=torch.Generator())
    store = hvd.CheckpointStore(directory, asynchronous=asynchronous) if directory else None
    step = 0
    if store is None:
        hvd.broadcast_initial_state(model, optimizer)
    elif saved := hvd.restore_or_broadcast(store, model, optimizer):
        step = saved["step"]
        sampler.load_state_dict(saved["sampler"])
        schedule.load_state_dict(saved["schedule"])
    losses, indices = {}, {}
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, chosen in loader:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            if step + 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            schedule.step()
            sampler.advance(len(inputs))
            step += 1
            losses[step], indices[step] = loss.item().hex(), chosen.tolist()
            if store and step % save_every == 0:
                extra = {"sampler": sampler.state_dict(), "schedule": schedule.state_dict()}
                state = hvd.gather_random_state()
                store.save(step, model, optimizer, random=state, **extra)
            if step == stop_at:
                break
        if step == stop_at:
            break
    if store:
        store.close()
    hvd.check_replicas(model)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, indices, parameters.numpy().tobytes().hex()


def note(name, value):
    """Keep a value of this rank for a later launch."""
    Path(os.environ["HVDKIT_TEST_SCRATCH"], f"{name}-{hvd.rank()}.json").write_text(
        json.dumps(value)
    )


def recall(name, rank):
    """Return what ``note`` kept in an earlier launch; numbers that are keys are strings."""
    path = Path(os.environ["HVDKIT_TEST_SCRATCH"], f"{name}-{rank}.json")
    return json.loads(path.read_text())
