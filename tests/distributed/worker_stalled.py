"""Rank 0 all-reduces a name that rank 1 never submits; each rank prints what it is told."""

import time

import torch

import hvdkit.torch as hvd

hvd.init()
try:
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(3), name="lonely")
    else:
        time.sleep(8)
        hvd.allreduce(torch.ones(3), name="another")
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()} was told: {error}", flush=True)
    raise
