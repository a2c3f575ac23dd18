"""Checks of CheckpointStore and restore_or_broadcast."""

import resource
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.errors import CheckpointError, RankDisagreementError
from hvdkit.torch.checkpoint import CheckpointStore, restore_or_broadcast
from hvdkit.torch.collectives import allgather_object, broadcast_object
from hvdkit.torch.replicas import check_replicas
from hvdkit.torch.sampler import shard
from tests.distributed.worker import run_checks

SCRATCH: list[Path] = []


def new_directory():
    path = tempfile.mkdtemp(prefix="hvdkit-checkpoints-") if hvd.rank() == 0 else None
    SCRATCH.append(Path(broadcast_object(path, name="directory")))
    return SCRATCH[-1]


def make(seed, wrapped=True):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer


def train(model, optimizer, steps, seed=0):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()


def everything(model, optimizer):
    state = {
        f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()
    }
    return {**model.state_dict(), **state}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def check_an_empty_store_starts_from_the_root():
    store = CheckpointStore(new_directory())
    model, optimizer = make(hvd.rank())
    assert restore_or_broadcast(store, model, optimizer) is None
    check_replicas(model)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.01


def check_training_goes_on_as_if_never_stopped():
    for wrapped in (True, False):
        directory = new_directory()
        store = CheckpointStore(directory)
        model, optimizer = make(7, wrapped)
        sampler = shard(range(20), seed=5)
        train(model, optimizer, 3)
        sampler.advance(4)
        path = store.save(3, model, optimizer, sampler=sampler.state_dict(), best=0.5)
        assert (path is not None) == (hvd.rank() == 0)
        train(model, optimizer, 2, seed=1)

        again, other = make(hvd.rank(), wrapped)
        extra = restore_or_broadcast(CheckpointStore(directory), again, other)
        assert extra == {"step": 3, "best": 0.5, "sampler": sampler.state_dict()}
        check_replicas(again, buffers=True)
        train(again, other, 2, seed=1)
        assert equal(everything(again, other), everything(model, optimizer))
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        hvd.barrier()


def check_going_back_in_the_middle_of_training():
    directory = new_directory()
    store = CheckpointStore(directory)
    model, optimizer = make(3)
    train(model, optimizer, 2)
    store.save(2, model, optimizer)
    train(model, optimizer, 2, seed=1)
    ahead = everything(model, optimizer)
    hvd.barrier()
    # Only the root loads, so loading must not be what makes a rank plan its reductions anew.
    assert restore_or_broadcast(store, model, optimizer) == {"step": 2}
    train(model, optimizer, 2, seed=1)
    check_replicas(model, buffers=True)
    assert equal(everything(model, optimizer), ahead)


def check_a_checkpoint_crosses_between_wrapped_and_plain():
    directory = new_directory()
    model, optimizer = make(1)
    train(model, optimizer, 2)
    CheckpointStore(directory).save(2, model, optimizer)
    plain_model, plain = make(2, wrapped=False)
    restore_or_broadcast(CheckpointStore(directory), plain_model, plain)
    assert equal(everything(plain_model, plain), everything(model, optimizer))


class Master(torch.optim.Optimizer):
    """Keeps float32 state of bfloat16 parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float())
                master -= group["lr"] * p.grad.float()
                p.data.copy_(master)


def check_state_wider_than_its_parameter_keeps_its_bits():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Master(model.parameters())
    model(torch.randn(4, 3).bfloat16()).float().square().mean().backward()
    optimizer.step()
    expected = optimizer.state[model.weight]["master"]
    assert not torch.equal(expected, expected.bfloat16().float())
    store = CheckpointStore(new_directory())
    store.save(1, model, optimizer)
    other = nn.Linear(3, 2).bfloat16()
    restored = Master(other.parameters())
    restore_or_broadcast(store, other, restored)
    assert torch.equal(restored.state[other.weight]["master"], expected)


def check_a_damaged_newest_falls_back_on_all_ranks():
    store = CheckpointStore(new_directory())
    model, optimizer = make(1)
    saved = {}
    for step in (1, 2):
        train(model, optimizer, 1)
        path = store.save(step, model, optimizer)
        saved[step] = {k: v.clone() for k, v in model.state_dict().items()}
    if hvd.rank() == 0:
        path.write_bytes(path.read_bytes()[:-100])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = restore_or_broadcast(store, model, optimizer)
    assert extra == {"step": 1}
    assert equal(dict(model.state_dict()), saved[1])
    assert any("damaged" in str(w.message) for w in caught) == (hvd.rank() == 0)


def check_a_root_that_cannot_load_is_an_error_on_all_ranks():
    model, optimizer = make(0)

    def fails(store, match, *targets):
        kind = CheckpointError if hvd.rank() == 0 else RankDisagreementError
        with pytest.raises(kind, match=match):
            restore_or_broadcast(store, *targets)

    store = CheckpointStore(new_directory())
    path = store.save(1, model)
    fails(store, "saved without the optimizer", model, optimizer)
    fails(store, "step 1 does not fit this model", nn.Linear(2, 2))
    if hvd.rank() == 0:
        path.write_bytes(b"")
    fails(store, "all 1 checkpoints .* are damaged", model)
    hvd.barrier()


def check_what_could_not_be_loaded_is_not_saved():
    store = CheckpointStore(new_directory())
    model, _ = make(0)
    store.save(1, model, history=[(1, 0.5), {"a": torch.ones(2)}], name="run", nothing=None)
    if hvd.rank() == 0:
        with pytest.raises(CheckpointError, match=r"step 2 holds .*numpy.*weights_only=True"):
            store.save(2, model, loss=np.float64(0.5))
        loaded = store.load()
        assert loaded["step"] == 1
        assert loaded["optimizer"] is None
        assert loaded["extra"]["history"][0] == (1, 0.5)
        assert store.load(step=1)["extra"]["name"] == "run"
    else:
        assert store.save(2, model, loss=np.float64(0.5)) is None
    hvd.barrier()


def check_a_full_disk_is_named():
    store = CheckpointStore(new_directory())
    model, optimizer = make(0)
    store.save(1, model, optimizer)
    if hvd.rank() == 0:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"cannot write .* step 2 .*too large"):
                store.save(2, model, optimizer, more=torch.zeros(10_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.load()["step"] == 1
        assert len(list(store.directory.iterdir())) == 2
    hvd.barrier()


def check_another_root_reads_its_own_store():
    directory = new_directory()
    model, optimizer = make(3)
    train(model, optimizer, 1)
    CheckpointStore(directory).save(4, model, optimizer)
    hvd.barrier()
    mine = directory if hvd.rank() == 1 else directory / "nowhere"
    other, fresh = make(hvd.rank())
    extra = restore_or_broadcast(CheckpointStore(mine), other, fresh, root_rank=1)
    assert extra == {"step": 4}
    assert equal(everything(other, fresh), everything(model, optimizer))
    assert len(set(allgather_object(str(everything(other, fresh)), name="all"))) == 1


def check_scratch_is_removed():
    hvd.barrier()
    if hvd.rank() == 0:
        for path in SCRATCH:
            shutil.rmtree(path)


if __name__ == "__main__":
    run_checks(globals())
