"""A worker of ``hvdkit exec``; with a rank in argv it reduces until that one has died.

With a file as well it begins that when the file is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import hvdkit.torch as hvd

STEPS = 2000


def main(victim: int = -1, begin: Path | None = None) -> None:
    hvd.init()
    place = f"{hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()} here"
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="all are there")
    print(f"worker {place}, sum {total.item():.0f}", flush=True)
    if victim == -1:
        return
    while begin is not None and not begin.exists():
        time.sleep(0.05)
    for step in range(STEPS):
        if step == 20 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1000), name=f"step {step}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *map(Path, sys.argv[2:]))
