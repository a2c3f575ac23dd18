"""What a worker finds when it is launched: run by test_launching.py, one JSON file a rank."""

import json
import os
import sys
import time
from pathlib import Path

import torch

import hvdkit.torch as hvd

if __name__ == "__main__":
    results, wait_for = Path(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="workers")
    found = {
        "environment": dict(os.environ),
        "arguments": sys.argv[3:],
        "folder": os.getcwd(),
        "stdin": sys.stdin.read(),
        "workers": total.item(),
    }
    part = results / f"{hvd.rank()}.part"
    part.write_text(json.dumps(found), encoding="utf-8")
    part.rename(results / f"{hvd.rank()}.json")
    # So that the test can look at command lines of this host while it runs.
    deadline = time.monotonic() + 60
    while not wait_for.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
