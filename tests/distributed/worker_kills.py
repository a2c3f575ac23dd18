"""Training that goes on from a checkpoint, saves more, and is killed: argv has folder and seed.

The seed says in which phase of which step (forward, backward with its reductions, update, saving)
which rank is killed; a random time after the phase has begun, so the moment may fall anywhere.
"""

import os
import random
import signal
import sys
import threading

import torch

import hvdkit.torch as hvd

PHASES = ("forward", "backward", "update", "save")
LATEST_S = 0.03


def main(directory: str, seed: int) -> None:
    hvd.init()
    chance = random.Random(seed)
    phase, fatal_step = PHASES[seed % len(PHASES)], 2 * chance.randrange(2, 6)
    victim = 0 if phase == "save" else chance.randrange(hvd.size())
    after_s = chance.uniform(0, LATEST_S)
    if hvd.rank() == victim:
        print(f"rank {victim} dies {1e3 * after_s:.0f} ms after {phase} {fatal_step}", flush=True)

    def enter(name: str, step: int) -> None:
        if (name, step, hvd.rank()) == (phase, fatal_step, victim):
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    model = torch.nn.Sequential(torch.nn.Linear(500, 2000), torch.nn.Linear(2000, 1000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-4), named_parameters=model.named_parameters()
    )
    store = hvd.CheckpointStore(directory)
    restored = hvd.restore_or_broadcast(store, model, optimizer)
    start = restored["step"] if restored else 0
    hvd.check_replicas(model)
    print(f"rank {hvd.rank()} starts at {start}", flush=True)
    for step in range(5000):  # of which the fatal one is among the first
        inputs = torch.randn(4, 500)
        optimizer.zero_grad()
        enter("forward", step)
        loss = model(inputs).square().mean()
        enter("backward", step)
        loss.backward()
        enter("update", step)
        optimizer.step()
        if step % 2 == 0:
            enter("save", step)
            store.save(start + step + 1, model, optimizer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
