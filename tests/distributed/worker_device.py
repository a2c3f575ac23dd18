"""Device and threads of two workers on one host."""

import os
import warnings

import pytest
import torch
from horovod import torch as hvd

from hvdkit.errors import EnvironmentMismatchError
from hvdkit.torch.device import pick_device, set_threads
from tests.distributed.worker import run_checks

CORES = len(os.sched_getaffinity(0))


def check_threads_share_the_cores():
    os.environ.pop("OMP_NUM_THREADS", None)
    share = max(1, CORES // hvd.local_size())
    assert set_threads() == share
    assert torch.get_num_threads() == share


def check_the_variable_wins_over_the_share():
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    assert set_threads() == 1


def check_too_many_threads_are_named_once_a_host():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert set_threads(CORES) == CORES
    messages = [str(warning.message) for warning in caught]
    expected = f"{hvd.local_size()} workers with {CORES} threads each share {CORES} cores"
    if hvd.local_rank() == 0:
        assert len(messages) == 1
        assert expected in messages[0]
    else:
        assert messages == []
    torch.set_num_threads(1)


def check_threads_below_one_are_refused():
    with pytest.raises(ValueError, match="at least 1 thread; got 0"):
        set_threads(0)


def check_the_cpu_is_there_when_asked_for():
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="'auto', 'cpu' or 'cuda'; got 'tpu'"):
        pick_device("tpu")


def check_more_workers_than_gpus_fail_on_all_of_them():
    # One GPU, whatever this machine has: the error must come on both ranks alike.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for kind in ("auto", "cuda"):
            with pytest.raises(EnvironmentMismatchError, match=r"2 workers .* sees 1 GPUs"):
                pick_device(kind)


def check_a_gpu_goes_by_local_rank():
    pinned = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "set_device", pinned.append)
        assert pick_device() == torch.device("cuda", hvd.local_rank())
    assert pinned == [hvd.local_rank()]


if __name__ == "__main__":
    run_checks(globals())
