"""Checks of CheckpointStore and restore_or_broadcast, on either backend of Keras."""

import json
import os
import random
import resource
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import CheckpointError, RankDisagreementError
from hvdkit.keras.collectives import allgather_object
from tests.distributed.worker import run_checks

SCRATCH = Path(os.environ["HVDKIT_TEST_SCRATCH"])
COUNT = iter(range(1000))


def new_directory():
    return SCRATCH / f"checkpoints-{next(COUNT)}"


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
            *("format", "framework", "hvdkit_version", "sequence", "step", "score", "payload"),
            *("size_bytes", "sha256", "manifest_sha256"),
        }
        assert (manifest["framework"], manifest["step"]) == ("keras", 4)
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
    store.close()  # the next writer is another process
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
    store.save(np.int64(1), make(0)[0], **extra)
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


def check_the_best_is_kept_and_restored():
    store = hvd.CheckpointStore(new_directory(), keep=1, keep_best=1)
    model, optimizer = make(3)
    for step, score in enumerate([np.float32(0.75), keras.ops.convert_to_tensor(0.25), 0.5]):
        train(model, 1)
        store.save(step, model, optimizer, score=score, seen=step)
        if step == 1:
            best = everything(model)
    everyones(0)
    if hvd.rank() == 0:
        assert [saved.step for saved in store.checkpoints()] == [1, 2]
        assert store.load(best=True)["extra"] == {"seen": 1}
    assert hvd.restore_or_broadcast(store, model, best=True) == {"step": 1, "seen": 1}
    assert_equal(everything(model), best)
    assert hvd.restore_or_broadcast(store, model) == {"step": 2, "seen": 2}


def check_what_is_written_beside_training_is_the_state_at_the_call():
    """The writer is held back until training has changed everything."""
    go = threading.Event()

    class Held(hvd.CheckpointStore):
        def write(self, step, write_payload, score=None):
            return super().write(step, lambda file: (go.wait(30), write_payload(file)), score)

    store = Held(new_directory(), asynchronous=True)
    model, optimizer = make(4)
    train(model, 2)
    array = np.arange(6.0)
    shared = {"base": array, "row": array.reshape(2, 3)[1], "history": [1, 2]}
    expected = everything(model)
    store.save(2, model, optimizer, shared=shared)
    train(model, 2, seed=1)
    array.fill(-1)
    shared["history"].append(3)
    go.set()
    store.wait()
    everyones(0)
    restored = hvd.restore_or_broadcast(store, model)
    assert_equal(everything(model), expected)
    np.testing.assert_array_equal(restored["shared"]["base"], np.arange(6.0))
    np.testing.assert_array_equal(restored["shared"]["row"], [3.0, 4.0, 5.0])
    assert restored["shared"]["history"] == [1, 2]


def check_an_error_beside_training_comes_with_the_next_save():
    store = hvd.CheckpointStore(new_directory(), asynchronous=True)
    model, _ = make(0)
    store.save(1, model)
    if hvd.rank() == 0:
        store.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            store.save(2, model, more=np.zeros(10_000))
            assert [saved.step for saved in store.checkpoints()] == [1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(CheckpointError, match=r"cannot write .* step 2 .*too large"):
            store.save(3, model)
        store.save(4, model)
        assert [saved.step for saved in store.checkpoints()] == [1, 4]


def check_a_checkpoint_of_pytorch_is_refused_by_name():
    class Theirs(hvd.CheckpointStore):
        framework = "torch"

    directory = new_directory()
    model, _ = make(0)
    Theirs(directory).save(1, model)
    kind = CheckpointError if hvd.rank() == 0 else RankDisagreementError
    everyones(0)
    with pytest.raises(kind, match=r"saved by hvdkit\.torch.*uses hvdkit\.keras"):
        hvd.restore_or_broadcast(hvd.CheckpointStore(directory), model)


def draw(model):
    values = [random.random(), np.random.rand(), float(keras.random.uniform(()))]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        values.append(float(tf.random.get_global_generator().uniform(())))
    inputs = np.random.default_rng(0).standard_normal((32, 3))
    values.append(np.asarray(keras.ops.convert_to_numpy(model(inputs, training=True))))
    return [value if isinstance(value, float) else value.tobytes() for value in values]


def check_every_rank_gets_its_own_random_state_back():
    store = hvd.CheckpointStore(new_directory())
    model, optimizer = make(1)
    hvd.broadcast_initial_state(model, optimizer)
    keras.utils.set_random_seed(100 + hvd.rank())
    for layer in model.layers:  # these were made, and broadcast, before
        if hasattr(layer, "seed_generator"):
            layer.seed_generator.state.assign(np.array([hvd.rank(), 5], "int32"))
    draw(model)
    store.save(1, model, optimizer, random=hvd.gather_random_state(model))
    expected = draw(model)
    everyones(0)
    assert hvd.restore_or_broadcast(store, model) == {"step": 1}
    assert draw(model) == expected
    assert all(len(set(drawn)) == hvd.size() for drawn in zip(*everyones(expected), strict=True))
    # As if it had been saved by one rank: every rank draws what follows from that, its own.
    alone = hvd.CheckpointStore(new_directory())
    alone.save(1, model, optimizer, random=hvd.gather_random_state(model)[:1])
    everyones(0)
    drawn = []
    for _ in range(2):
        hvd.restore_or_broadcast(alone, model)
        drawn.append(draw(model))
    assert drawn[0] == drawn[1]
    assert all(len(set(one)) == hvd.size() for one in zip(*everyones(drawn[0]), strict=True))


if __name__ == "__main__":
    run_checks(globals())
