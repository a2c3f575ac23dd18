"""A worker of ``hvdkit exec``; with a rank in argv it reduces until that one has died."""

import os
import signal
import sys

import torch

import hvdkit.torch as hvd

STEPS = 2000


def main(victim: int) -> None:
    hvd.init()
    place = f"{hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()} here"
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="all are there")
    print(f"worker {place}, sum {total.item():.0f}", flush=True)
    if victim == -1:
        return
    for step in range(STEPS):
        if step == 20 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1000), name=f"step {step}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else -1)
