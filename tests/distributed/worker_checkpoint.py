"""Checks of CheckpointStore and restore_or_broadcast."""

import hashlib
import io
import json
import os
import pickle
import random
import resource
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hvdkit.torch as hvd
from hvdkit.errors import CheckpointError, RankDisagreementError
from hvdkit.torch.checkpoint import CheckpointStore, restore_or_broadcast
from hvdkit.torch.collectives import allgather_object
from hvdkit.torch.random_state import gather_random_state
from hvdkit.torch.replicas import check_replicas
from hvdkit.torch.sampler import shard
from tests.distributed.worker import run_checks

SCRATCH = Path(os.environ["HVDKIT_TEST_SCRATCH"])
COUNT = iter(range(1000))


def new_directory():
    return SCRATCH / f"checkpoints-{next(COUNT)}"


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
            store.save(2, model, losses=np.ones(2))
        loaded = store.load()
        assert loaded["step"] == 1
        assert loaded["optimizer"] is None
        assert loaded["extra"]["history"][0] == (1, 0.5)
        assert store.load(step=1)["extra"]["name"] == "run"
    else:
        assert store.save(2, model, losses=np.ones(2)) is None
    hvd.barrier()


def check_numbers_of_numpy_are_saved_as_those_of_python():
    """A rate from a schedule that is computed with NumPy must not end the job at a save."""
    for asynchronous in (False, True):
        store = CheckpointStore(new_directory(), asynchronous=asynchronous)
        model, optimizer = make(0)
        train(model, optimizer, 1)
        optimizer.param_groups[0]["lr"] = 0.02 * np.cos(0.3)
        optimizer.state[model[0].weight]["calls"] = np.int64(2**40)
        train(model, optimizer, 1)
        store.save(np.int64(2), model, optimizer, score=np.float32(1.5), losses=[np.float32(0.1)])
        store.close()
        assert type(optimizer.param_groups[0]["lr"]) is np.float64
        fresh, other = make(1)
        restored = restore_or_broadcast(store, fresh, other)
        assert restored == {"step": 2, "losses": [float(np.float32(0.1))]}
        assert other.param_groups[0]["lr"] == 0.02 * np.cos(0.3)
        assert type(other.param_groups[0]["lr"]) is float
        assert other.state[fresh[0].weight]["calls"] == 2**40
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
        assert len(list(store.directory.glob("*-step-*"))) == 2
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


def check_the_best_is_kept_and_restored():
    store = CheckpointStore(new_directory(), keep=1, keep_best=1, best_mode="max")
    model, optimizer = make(3)
    for step, score in enumerate([torch.tensor(0.25), np.float32(0.75), 0.5]):
        train(model, optimizer, 1)
        store.save(step, model, optimizer, score=score, seen=step)
        if step == 1:
            best = {key: value.clone() for key, value in model.state_dict().items()}
    hvd.barrier()
    if hvd.rank() == 0:
        assert [saved.step for saved in store.checkpoints()] == [1, 2]
        assert store.load(best=True)["extra"] == {"seen": 1}
    assert restore_or_broadcast(store, model, optimizer, best=True) == {"step": 1, "seen": 1}
    assert equal(dict(model.state_dict()), best)
    assert restore_or_broadcast(store, model, optimizer) == {"step": 2, "seen": 2}


def check_what_is_written_beside_training_is_the_state_at_the_call():
    """The writer is held back until training has changed everything."""
    go = threading.Event()

    class Held(CheckpointStore):
        def write(self, step, write_payload, score=None):
            return super().write(step, lambda file: (go.wait(30), write_payload(file)), score)

    directory = new_directory()
    model, optimizer = make(4)
    train(model, optimizer, 2)
    base = torch.arange(6.0)
    aliases = {"base": base, "row": base.view(2, 3)[1], "column": base.view(2, 3)[:, 1]}
    aliases["nested"] = [(base[2:4], {"again": base})]
    plain = CheckpointStore(directory / "plain")
    plain.save(2, model, optimizer, shared=aliases, history=[1, 2])
    store = Held(directory / "held", asynchronous=True)
    history = [1, 2]
    store.save(2, model, optimizer, shared=aliases, history=history)
    train(model, optimizer, 2, seed=1)
    base.fill_(-1)
    history.append(3)
    go.set()
    store.wait()
    if hvd.rank() == 0:
        [expected, found] = [one.load() for one in (plain, store)]
        assert list(expected["model"]) == list(found["model"])
        assert expected["model"]._metadata == found["model"]._metadata
        assert equal(expected["model"], found["model"])
        for theirs, ours in zip(
            expected["optimizer"]["state"].values(),
            found["optimizer"]["state"].values(),
            strict=True,
        ):
            assert equal(theirs, ours)
        assert not equal(dict(model.state_dict()), found["model"])
        shared = found["extra"]["shared"]
        assert found["extra"]["history"] == [1, 2]
        assert torch.equal(shared["base"], torch.arange(6.0))
        assert torch.equal(shared["column"], torch.tensor([1.0, 4.0]))
        shared["base"].fill_(7)  # the others are still views of it
        assert shared["row"].tolist() == [7, 7, 7]
        assert shared["nested"][0][0].tolist() == [7, 7]
        sizes = [one.latest().path.stat().st_size for one in (plain, store)]
        assert abs(sizes[0] - sizes[1]) < 100  # no tensor is there twice
    hvd.barrier()


def check_every_kind_of_tensor_is_copied():
    store = CheckpointStore(new_directory(), asynchronous=True)
    kinds = {
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "transposed": torch.arange(6).view(2, 3).t(),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
    }
    store.save(1, **kinds)
    for tensor in kinds.values():
        if tensor.layout == torch.strided:
            tensor.detach().zero_()
    store.wait()
    if hvd.rank() == 0:
        found = store.load()["extra"]
        assert isinstance(found["parameter"], nn.Parameter)
        assert torch.equal(found["parameter"], torch.ones(2))
        assert torch.equal(found["bfloat16"], torch.ones(3, dtype=torch.bfloat16))
        assert torch.equal(found["transposed"], torch.arange(6).view(2, 3).t())
        assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
        assert found["complex"].tolist() == [1 - 2j]
        assert found["empty"].shape == (0, 4)
        assert found["scalar"].item() == 3


def check_an_error_beside_training_comes_with_the_next_save():
    store = CheckpointStore(new_directory(), asynchronous=True)
    store.save(1, loss=0.5)
    store.save(2, losses=np.ones(2))
    if hvd.rank() == 0:
        with pytest.raises(CheckpointError, match=r"step 2 holds .*numpy"):
            store.save(3, loss=0.5)
    store.save(4, loss=0.25)
    store.wait()
    if hvd.rank() == 0:
        assert [saved.step for saved in store.checkpoints()] == [1, 4]
    hvd.barrier()


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(SCRATCH / "bombed"),)


def replace_payload(path, data):
    """Put another payload under a manifest that fits it."""
    path.write_bytes(data)
    manifest = json.loads(path.with_suffix(".json").read_text())
    del manifest["manifest_sha256"]
    manifest |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    text = json.dumps(manifest | {"manifest_sha256": seal}, indent=2)
    path.with_suffix(".json").write_text(text)


def check_code_under_a_valid_manifest_is_refused_and_not_run():
    store = CheckpointStore(new_directory())
    model, optimizer = make(0)
    path = store.save(1, model, optimizer)
    kind = CheckpointError if hvd.rank() == 0 else RankDisagreementError
    zipped = io.BytesIO()
    torch.save({"step": 1, "model": Bomb(), "optimizer": None, "extra": {}}, zipped)
    for data in (pickle.dumps(Bomb()), zipped.getvalue(), b"text", b"", pickle.dumps({"a": 1})):
        if hvd.rank() == 0:
            replace_payload(path, data)
            assert store.latest() is not None
        hvd.barrier()
        with pytest.raises(kind, match=r"cannot be loaded as a checkpoint of hvdkit\.torch"):
            restore_or_broadcast(store, model, optimizer)
    assert not (SCRATCH / "bombed").exists()


def check_a_checkpoint_of_the_first_format_is_read():
    """As hvdkit 0.1 wrote it: no framework in the manifest, no random state in the payload."""
    directory = new_directory()
    model, optimizer = make(1)
    if hvd.rank() == 0:
        directory.mkdir()
        path = directory / "00000001-step-5.ckpt"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": {}}
        torch.save({"step": 5, **state}, path)
        entries = {"format": 1, "sequence": 1, "step": 5, "payload": path.name}
        path.with_suffix(".json").write_text(json.dumps(entries | {"manifest_sha256": ""}))
        replace_payload(path, path.read_bytes())
    other, fresh = make(2)
    assert restore_or_broadcast(CheckpointStore(directory), other, fresh) == {"step": 5}
    assert equal(everything(other, fresh), everything(model, optimizer))


def draw():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def check_every_rank_gets_its_own_random_state_back():
    store = CheckpointStore(new_directory())
    model, _ = make(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + hvd.rank())
    draw()
    store.save(1, model, random=gather_random_state())
    expected = draw()
    hvd.barrier()
    assert restore_or_broadcast(store, model) == {"step": 1}
    assert draw() == expected
    assert len(set(allgather_object(expected, name="draws"))) == hvd.size()
    # As if it had been saved by one rank: every rank draws what follows from that, its own.
    alone = new_directory()
    CheckpointStore(alone).save(1, model, random=gather_random_state()[:1])
    hvd.barrier()
    drawn = []
    for _ in range(2):
        restore_or_broadcast(CheckpointStore(alone), model)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert len(set(allgather_object(drawn[0], name="draws"))) == hvd.size()


def check_a_process_goes_on_saving_after_horovod_was_started_anew():
    store = CheckpointStore(new_directory(), asynchronous=True)
    model, _ = make(1)
    store.save(1, model)
    hvd.shutdown()
    hvd.init()
    store.save(2, model)
    store.wait()
    again = CheckpointStore(store.directory)  # of the same process
    again.save(3, model)
    hvd.barrier()
    assert restore_or_broadcast(again, model) == {"step": 3}
    if hvd.rank() == 0:
        assert [saved.step for saved in store.checkpoints()] == [1, 2, 3]


if __name__ == "__main__":
    run_checks(globals())
