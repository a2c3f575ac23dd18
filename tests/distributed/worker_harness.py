"""Checks that the harness's own tests start, some of them broken on purpose by arguments."""

import os
import sys
import time

import horovod.torch as hvd
import torch

from tests.distributed.worker import run_checks


def check_ranks_sum():
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="ranks")
    assert total.item() == sum(range(1, hvd.size() + 1))


def check_fails_on_rank_1():
    assert "fail" not in sys.argv or hvd.rank() != 1, "rank 1 was told to fail"
    hvd.allreduce(torch.ones(1), name="after the failure")


def check_hangs_on_rank_0():
    if "hang" in sys.argv and hvd.rank() == 0:
        time.sleep(600)
    if "die" in sys.argv and hvd.rank() == 1:
        os._exit(7)
    hvd.allreduce(torch.ones(1), name="after the hang")


if __name__ == "__main__":
    run_checks(globals())
