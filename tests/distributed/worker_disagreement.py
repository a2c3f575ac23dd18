"""Ranks that disagree in ways that only show while they train; argv says in which."""

import sys
import time

import torch

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(4, 3, sparse=True), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
)
parameters = dict(model.named_parameters())
options: dict = {}
if sys.argv[1] == "groups":
    weights = [[parameters["1.weight"]], [parameters["2.weight"]]]
    options["groups"] = weights[::-1] if hvd.rank() == 1 else weights
if sys.argv[1] == "direct":
    options["bucket_size_mb"] = 1e-5  # every parameter is large beside it
frozen = {"bucket": "1.weight", "direct": "2.weight", "sparse": "0.weight"}.get(sys.argv[1])
try:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **options
    )
    for step in range(4):
        if frozen and step == 2 and hvd.rank() == 1:
            parameters[frozen].requires_grad_(False)
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank(), 3])).sum().backward()
        optimizer.step()
except (hvd.HorovodInternalError, RuntimeError) as error:
    print(f"rank {hvd.rank()} was told: {type(error).__name__}: {error}", flush=True)
    if not isinstance(error, hvd.HorovodInternalError):
        time.sleep(1)
        hvd.shutdown()
    time.sleep(2)  # horovodrun ends the others as soon as one fails: let them print as well
    raise
