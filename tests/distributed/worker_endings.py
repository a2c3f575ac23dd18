"""Jobs that end, lose a rank or start anew; argv says how."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import torch

import hvdkit.torch as hvd
from hvdkit.errors import HvdkitError


def restart():
    for _ in range(12):
        hvd.init()
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="total")
        assert total.item() == hvd.size()
        hvd.shutdown()
    print(f"rank {os.environ['HOROVOD_RANK']} restarted", flush=True)


def lose_a_rank():
    """Rank 1 dies while a process set of the other rank exists."""
    alone = hvd.ProcessSet([0])
    hvd.init(process_sets=[alone])
    hvd.allreduce(torch.ones(1), name="all are there")
    if hvd.rank() == 1:
        os._exit(7)
    try:
        hvd.allreduce(torch.ones(1), name="the others")
    except hvd.HorovodInternalError:
        print("rank 0 was told", flush=True)
        time.sleep(1)  # horovodrun ends this rank as soon as it has seen the other's end
        raise


def leave_a_child():
    """Each rank has a child that holds its output; rank 1 dies."""
    subprocess.Popen(["sleep", "61.25"])
    lose_a_rank()


def join_while_tuning():
    hvd.init()
    for step in range(5 + 5 * hvd.rank()):
        hvd.allreduce(torch.ones(4), name=f"step {step}")
    assert hvd.join() == 1
    print(f"rank {hvd.rank()} joined", flush=True)


def exit_while_a_thread_waits():
    hvd.init()
    hvd.allreduce(torch.ones(1), name="all are there")
    name = f"only rank {hvd.rank()}"
    threading.Thread(target=lambda: hvd.allreduce(torch.ones(1), name=name), daemon=True).start()
    time.sleep(1)
    ctypes.CDLL(None).exit(0)  # as a C library may, without Python's exit handlers


def start_without_a_peer():
    """Rank 1 ends before it connects."""
    if os.environ["HOROVOD_RANK"] == "1":
        time.sleep(8)  # a worker that fails at once has horovodrun end the others
        sys.exit(7)
    try:
        hvd.init()
    except HvdkitError as error:
        print(f"rank 0 was told: {error}", flush=True)
        raise


def start_without_a_server():
    """Nobody listens where the launcher should; alone, without a launcher, it works then."""
    try:
        hvd.init()
    except HvdkitError as error:
        print(f"rank 0 was told: {error}", flush=True)
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        if name not in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):  # of one process
            del os.environ[name]
    hvd.init()
    assert hvd.allreduce(torch.ones(1), name="alone").item() == hvd.size() == 1
    print("started alone", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
