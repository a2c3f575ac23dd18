"""Checks of CheckpointStore and restore_or_broadcast, on either backend of Keras."""

import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import CheckpointError, RankDisagreementError
from hvdkit.keras.collectives import allgather_object
from tests.distributed.worker import run_checks

SCRATCH = []


def new_directory():
    path = tempfile.mkdtemp(prefix="hvdkit-checkpoints-") if hvd.rank() == 0 else None
    SCRATCH.append(Path(everyones(path)[0]))
    return SCRATCH[-1]


def everyones(value):
    return allgather_object(value, name="tests", process_set=hvd.global_process_set)


def make(seed, wrapped=True, dtype="float32", around=lambda optimizer: optimizer):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,), dtype=dtype),
            layers.Dense(4, dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dropout(0.3, dtype=dtype),
            layers.Dense(1, dtype=dtype),
        ]
    )
    optimizer = around(keras.optimizers.AdamW(0.01 * (1 + seed)))
    model.compile(hvd.DistributedOptimizer(optimizer) if wrapped else optimizer, "mse")
    return model, optimizer


def train(model, steps, seed=0):
    keras.utils.set_random_seed(seed)  # PyTorch's dropout has no seed of its own
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        model.train_on_batch(generator.standard_normal((8, 3), np.float32), np.ones((8, 1)))


def everything(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def check_an_empty_store_starts_from_the_root():
    model, optimizer = make(hvd.rank())
    assert hvd.restore_or_broadcast(hvd.CheckpointStore(new_directory()), model) is None
    hvd.check_replicas(model, buffers=True)
    assert float(optimizer.learning_rate) == pytest.approx(0.01)


def check_training_goes_on_as_if_never_stopped():
    scaled = keras.optimizers.LossScaleOptimizer
    for options in ({"wrapped": True}, {"wrapped": False}, {"around": scaled}):
        directory = new_directory()
        model, optimizer = make(7, **options)
        train(model, 3)
        path = hvd.CheckpointStore(directory).save(3, model, optimizer, best=0.5)
        assert (path is not None) == (hvd.rank() == 0)
        train(model, 2, seed=1)
        everyones(0)  # the checkpoint is written
        again, other = make(hvd.rank(), **options)
        restored = hvd.restore_or_broadcast(hvd.CheckpointStore(directory), again, other)
        assert restored == {"step": 3, "best": 0.5}
        hvd.check_replicas(again, buffers=True)
        train(again, 2, seed=1)
        assert_equal(everything(again), everything(model))


def check_an_optimizer_that_its_first_step_built_on_the_root_only():
    model, optimizer = make(hvd.rank(), False, around=keras.optimizers.LossScaleOptimizer)
    if hvd.rank() == 0:
        train(model, 1)
    hvd.broadcast_initial_state(model, optimizer)
    assert len(set(everyones(tuple(a.tobytes() for a in everything(model))))) == 1
    assert int(optimizer.inner_optimizer.iterations) == 1


def check_a_checkpoint_crosses_between_wrapped_and_plain_and_keeps_16_bits():
    for dtype in ("float32", "bfloat16", "float16"):
        store = hvd.CheckpointStore(new_directory())
        model, optimizer = make(1, dtype=dtype)
        train(model, 2)
        store.save(2, model, optimizer)
        plain, other = make(2, wrapped=False, dtype=dtype)
        assert hvd.restore_or_broadcast(store, plain, other) == {"step": 2}
        assert_equal(everything(plain), everything(model))


def check_the_manifest_is_that_of_every_adapter():
    store = hvd.CheckpointStore(new_directory())
    path = store.save(4, make(0)[0])
    if hvd.rank() == 0:
        manifest = json.loads(path.with_suffix(".json").read_text())
        assert set(manifest) == {
            *("format", "sequence", "step", "payload", "size_bytes", "sha256", "manifest_sha256")
        }
        assert manifest["step"] == 4
        assert b"pickle" not in path.read_bytes()
        with np.load(path, allow_pickle=False) as payload:
            assert "header" in payload.files


def check_a_crash_while_saving_leaves_the_checkpoint_before():
    store = hvd.CheckpointStore(new_directory())
    model, optimizer = make(1)
    train(model, 1)
    store.save(1, model, optimizer)
    saved = everything(model)
    train(model, 1)
    if hvd.rank() == 0:
        script = (
            "import os, sys, hvdkit.checkpoint as c\n"
            "def die(file):\n    file.write(b'half'); file.flush(); os._exit(3)\n"
            "c.CheckpointStore(sys.argv[1]).write(2, die)"
        )
        died = subprocess.run([sys.executable, "-c", script, str(store.directory)], check=False)
        assert died.returncode == 3
        assert list(store.directory.glob("*.part"))
    assert hvd.restore_or_broadcast(store, model, optimizer) == {"step": 1}
    assert_equal(everything(model), saved)
    store.save(2, model, optimizer)
    if hvd.rank() == 0:
        assert not list(store.directory.glob("*.part"))
        assert store.load()["step"] == 2


def check_a_damaged_newest_falls_back_on_all_ranks():
    store = hvd.CheckpointStore(new_directory())
    model, optimizer = make(1)
    for step in (1, 2):
        train(model, 1)
        path = store.save(step, model, optimizer)
    if hvd.rank() == 0:
        path.write_bytes(path.read_bytes()[:-100])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hvd.restore_or_broadcast(store, model, optimizer) == {"step": 1}
    assert any("damaged" in str(w.message) for w in caught) == (hvd.rank() == 0)
    hvd.check_replicas(model, buffers=True)


def check_a_root_that_cannot_load_is_an_error_on_all_ranks():
    model, optimizer = make(0)

    def fails(store, match, *targets):
        kind = CheckpointError if hvd.rank() == 0 else RankDisagreementError
        with pytest.raises(kind, match=match):
            hvd.restore_or_broadcast(store, *targets)

    store = hvd.CheckpointStore(new_directory())
    path = store.save(1, model)
    fails(store, "saved without the optimizer", model, optimizer)
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    fails(store, "step 1 does not fit this model: it holds", other)
    store.save(2, model, optimizer)
    before = everything(model)
    fails(store, "does not fit this optimizer", model, keras.optimizers.SGD(0.1))
    assert_equal(everything(model), before)
    if hvd.rank() == 0:
        for damaged in path.parent.glob("*.ckpt"):
            damaged.write_bytes(b"")
    fails(store, "all 2 checkpoints .* are damaged", model)


def check_extra_values_come_back_as_they_were_or_are_refused():
    store = hvd.CheckpointStore(new_directory())
    extra = {
        "history": [(1, 0.5), {"a": [None, True, "text"], 3: float("inf")}],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "loss": np.float32(0.5),
        "tensor": keras.ops.convert_to_tensor([1.0, 2.0]),
        "dict": {"array": 1},
    }
    store.save(1, make(0)[0], **extra)
    if hvd.rank() == 0:
        loaded = store.load(step=1)["extra"]
        assert loaded["history"] == extra["history"]
        assert isinstance(loaded["history"][0], tuple)
        np.testing.assert_array_equal(loaded["array"], extra["array"])
        assert loaded["array"].dtype == np.int16
        np.testing.assert_array_equal(loaded["tensor"], [1.0, 2.0])
        assert (loaded["loss"], loaded["dict"]) == (0.5, {"array": 1})
        for value in (object(), {"a": [{1, 2}]}, np.array([object()])):
            with pytest.raises(CheckpointError, match=r"bad.*running code"):
                store.save(2, bad=value)
        assert [saved.step for saved in store.checkpoints()] == [1]


def check_another_root_reads_its_own_store():
    directory = new_directory()
    model, optimizer = make(3)
    train(model, 1)
    hvd.CheckpointStore(directory).save(4, model, optimizer)
    everyones(0)
    mine = directory if hvd.rank() == 1 else directory / "nowhere"
    other, fresh = make(hvd.rank())
    store = hvd.CheckpointStore(mine)
    assert hvd.restore_or_broadcast(store, other, fresh, root_rank=1) == {"step": 4}
    assert_equal(everything(other), everything(model))


def check_scratch_is_removed():
    everyones(0)
    if hvd.rank() == 0:
        for path in SCRATCH:
            shutil.rmtree(path)


if __name__ == "__main__":
    run_checks(globals())
