"""Each rank all-reduces a name that the other never submits, and prints what it is told."""

import time

import torch

import hvdkit.torch as hvd

hvd.init()
try:
    hvd.allreduce(torch.ones(3), name="lonely" if hvd.rank() == 0 else "another")
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()} was told: {error}", flush=True)
    time.sleep(2)  # horovodrun ends the others as soon as one fails: let them print as well
    raise
