"""A script to profile: a few steps of PyTorch, in which one rank computes longer than the others.

profiled_training.py SLOW_RANK STEPS [EXIT_STATUS]
"""

import os
import sys
import time

import torch

import hvdkit.torch as hvd

SLOW_S = 0.03

slow_rank, steps, *status = map(int, sys.argv[1:])
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(
    *(layer for _ in range(3) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh()))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), bucket_size_mb=0.3
)
hvd.broadcast_initial_state(model, optimizer)
inputs = torch.randn(64, 256)
for _ in range(steps):
    if hvd.rank() == slow_rank:
        time.sleep(SLOW_S)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
print(f"rank {hvd.rank()} trained", flush=True)
if status:
    os._exit(status[0])
