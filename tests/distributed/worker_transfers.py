"""All-reduces of all sizes and dtypes, the way that argv names: "memory", "sockets" or "forbidden".

The last takes from this process what a container's security settings may take from it, the right to
read its peers' memory. Argv names how ranks find out only; what they compute must be the same.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
import threading
import time

import pytest
import torch

import hvdkit.torch as hvd
from tests.distributed.worker import run_checks

DTYPES = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
# Elements: one, fewer than ranks, none that divides evenly, below and above what is worth it.
COUNTS = (1, 2, 1000, 65_537, 300_001, 1 << 20)
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}


def forbid_reading_others():
    """Make process_vm_readv fail with EPERM from now on, as seccomp in a container does."""
    number = PROCESS_VM_READV[platform.machine()]
    instructions = [
        (0x20, 0, 0, 0),  # load the system call's number
        (0x15, 0, 1, number),  # this one?
        (0x06, 0, 0, 0x00050000 | 1),  # EPERM
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


def make_inputs(count, dtype, ranks):
    """Small whole numbers, which every dtype adds up without rounding."""
    generators = [torch.Generator().manual_seed(rank) for rank in ranks]
    return [torch.randint(-3, 4, (count,), generator=one).to(dtype) for one in generators]


def reduce(inputs, op):
    stacked = torch.stack(inputs).to(torch.float64)
    if op == hvd.Average:
        return stacked.mean(0)
    if op == hvd.Sum:
        return stacked.sum(0)
    if op == hvd.Product:
        return stacked.prod(0)
    return stacked.amin(0) if op == hvd.Min else stacked.amax(0)


def check_every_size_dtype_and_operation():
    for count in COUNTS:
        for dtype in DTYPES:
            inputs = make_inputs(count, dtype, range(hvd.size()))
            mine = inputs[hvd.rank()]
            for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
                if op == hvd.Average and not dtype.is_floating_point:
                    continue
                found = hvd.allreduce(mine, op=op, name=f"{count}.{dtype}.{op}")
                tolerance = 2e-3 if dtype == torch.float16 else 1e-6
                torch.testing.assert_close(
                    found.to(torch.float64), reduce(inputs, op), rtol=tolerance, atol=tolerance
                )
            assert torch.equal(mine, inputs[hvd.rank()]), "the input has changed"


def check_all_ranks_get_the_same_bits():
    torch.manual_seed(hvd.rank())
    found = hvd.allreduce(torch.randn(300_001), op=hvd.Average, name="random")
    everyone = hvd.allgather(found[None], name="everyone")
    assert all(torch.equal(one, found) for one in everyone)


def check_factors_before_and_after():
    ones = torch.full((200_000,), hvd.rank() + 1.0)
    found = hvd.allreduce(
        ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, name="factors"
    )
    expected = 1.5 * sum(rank + 1 for rank in range(hvd.size()))
    assert torch.equal(found, torch.full_like(ones, expected))


def check_halves_near_the_limit_do_not_overflow():
    large = torch.full((200_000,), 60_000.0, dtype=torch.float16)
    found = hvd.allreduce(large, op=hvd.Sum, prescale_factor=1 / hvd.size(), name="large")
    torch.testing.assert_close(found, large)


def check_in_place():
    data = torch.full((500, 400), float(hvd.rank()))
    hvd.allreduce_(data, op=hvd.Sum, name="in place")
    assert torch.equal(data, torch.full_like(data, sum(range(hvd.size()))))


def check_many_at_once():
    tensors = [torch.full((100_000 + i,), float(hvd.rank() + i)) for i in range(20)]
    handles = [
        hvd.allreduce_async(one, op=hvd.Sum, name=f"many.{i}") for i, one in enumerate(tensors)
    ]
    for i, handle in enumerate(handles):
        expected = sum(rank + i for rank in range(hvd.size()))
        assert torch.equal(hvd.synchronize(handle), torch.full((100_000 + i,), float(expected)))
    found = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    assert all(len(one) == 100_000 + i for i, one in enumerate(found))


def check_a_set_of_some_ranks():
    ranks = list(range(hvd.size() - 1))
    some = hvd.add_process_set(ranks)
    if hvd.rank() in ranks:
        inputs = make_inputs(300_001, torch.float32, ranks)
        found = hvd.allreduce(inputs[hvd.rank()], op=hvd.Sum, name="some", process_set=some)
        assert torch.equal(found, sum(inputs))
    hvd.remove_process_set(some)


def check_one_that_has_joined_counts_as_zeros():
    if hvd.rank() > 0:
        found = hvd.allreduce(torch.ones(300_000), op=hvd.Sum, name="late")
        assert torch.equal(found, torch.full((300_000,), hvd.size() - 1.0))
    hvd.join()


def check_after_a_restart():
    hvd.shutdown()
    hvd.init()
    found = hvd.allreduce(torch.ones(300_000), op=hvd.Sum, name="again")
    assert torch.equal(found, torch.full((300_000,), float(hvd.size())))


def reduce_endlessly():
    data = torch.ones(4 << 20)
    while True:
        hvd.allreduce(data, op=hvd.Average, name="endless")


def lose_a_rank():
    """Rank 1 is killed while large all-reduces run, wherever it happens to be."""
    hvd.init()
    if hvd.rank() == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    with pytest.raises(hvd.HorovodInternalError):
        reduce_endlessly()
    print(f"rank {hvd.rank()} was told", flush=True)


def left_behind():
    """Rank 0 is stopped while it reads; rank 3, with which it never speaks, gives up meanwhile."""
    if os.environ["HOROVOD_RANK"] == "3":
        os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "3"
    hvd.init()
    pids = hvd.allgather(torch.tensor([os.getpid()])).tolist()
    data = torch.ones(24 << 20)
    hvd.allreduce_(data, op=hvd.Sum, name="data")
    data.fill_(1.0)
    if hvd.rank() == 0:
        part = data[len(data) // hvd.size() :]  # comes first from another rank
        first = ctypes.c_float.from_address(part.data_ptr())

        def stop_when_it_is_there():
            while first.value != hvd.size():
                pass
            os.kill(os.getpid(), signal.SIGSTOP)

        threading.Thread(target=stop_when_it_is_there, daemon=True).start()
    try:
        hvd.allreduce_(data, op=hvd.Sum, name="data")
        print(f"rank {hvd.rank()} has {data.min()} to {data.max()}", flush=True)
    except hvd.HorovodInternalError:
        data.fill_(-1.0)  # as someone who goes on from a checkpoint does
        print(f"rank {hvd.rank()} was told", flush=True)
    if hvd.rank() == 3:
        os.kill(pids[0], signal.SIGCONT)
    time.sleep(5)  # horovodrun ends all ranks as soon as it has seen one end
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] in ("lose_a_rank", "left_behind"):
        globals()[sys.argv[1]]()
    else:
        if sys.argv[1] == "sockets" and os.environ["HOROVOD_RANK"] == "0":
            os.environ["HOROVOD_SOCKETS_ONLY"] = "1"  # one that does not want to is enough
        if sys.argv[1] == "forbidden" and os.environ["HOROVOD_RANK"] == "1":
            forbid_reading_others()
        run_checks(globals())
