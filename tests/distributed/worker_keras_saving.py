"""Saved, copied and wrapped late: models and optimizers; on the backend of KERAS_BACKEND."""

import copy
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import HvdkitError
from tests.distributed.keras_training import (
    ROWS,
    assert_equal_models,
    build_model,
    compile_model,
    fit,
    make_data,
    read_weights,
)
from tests.distributed.worker import run_checks

TENSORFLOW = keras.backend.backend() == "tensorflow"

WITHOUT_HVDKIT = """
import sys
sys.modules["hvdkit"] = None  # import hvdkit now fails
sys.modules["horovod"] = None
import keras
import numpy as np
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    assert isinstance(model.optimizer, keras.optimizers.Adam), type(model.optimizer)
    assert type(model.optimizer).__module__.startswith("keras."), type(model.optimizer)
    assert int(model.optimizer.iterations) == 3, model.optimizer.iterations
    if path.endswith(".keras"):  # Keras itself loses the slots of the other kind
        assert any(np.any(v.numpy()) for v in model.optimizer.variables[2:])
        model.fit(np.zeros((4, 4)), np.zeros(4), verbose=0)
"""


def _wrap(make=lambda: keras.optimizers.Adam(0.01), **options):
    return hvd.DistributedOptimizer(make(), **options)


def _read(optimizer):
    return [np.asarray(v.numpy()) for v in optimizer.variables]


def check_c10_a_saved_model_loads_without_hvdkit_and_is_wrapped_again():
    data = make_data(6)
    first = (data[0][:48], data[1][:48])
    second = (data[0][48:], data[1][48:])
    reference = compile_model(build_model(), keras.optimizers.Adam(0.01))
    fit(reference, data, whole=True)
    model = compile_model(build_model(), _wrap())
    fit(model, first)
    with tempfile.TemporaryDirectory() as scratch:
        paths = [Path(scratch, f"model{suffix}") for suffix in (".keras", ".h5")]
        for path in paths:
            model.save(path)
        if hvd.rank() == 0:
            environment = {k: v for k, v in os.environ.items() if "HOROVOD" not in k}
            subprocess.run(
                [sys.executable, "-c", WITHOUT_HVDKIT, *paths], check=True, env=environment
            )
        loaded = [hvd.load_model(path) for path in paths]
    for again in loaded:
        assert int(again.optimizer.iterations) == 3
        for ours, saved in zip(_read(again.optimizer), _read(model.optimizer), strict=True):
            np.testing.assert_array_equal(ours, saved)
        fit(again, second)
        assert_equal_models(again, reference, atol=2e-5)


def check_load_model_passes_options_on():
    model = compile_model(build_model(), _wrap(backward_passes_per_step=2))
    fit(model, make_data(4))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.keras")
        model.save(path)
        loaded = hvd.load_model(path, backward_passes_per_step=2, clip_grad_norm=0.1)
        with pytest.raises(HvdkitError, match="accumulates over 2 passes"):
            hvd.load_model(path, backward_passes_per_step=3)
        with pytest.raises(ValueError, match="legacy"):
            hvd.load_model(path, legacy_opts=True)
    fit(loaded, make_data(4))
    hvd.check_replicas(loaded)


class Custom(keras.optimizers.SGD):
    """An optimizer that Keras does not know by name."""


def check_load_model_with_an_optimizer_of_the_users():
    model = compile_model(build_model(), _wrap(lambda: Custom(0.1, momentum=0.9)))
    fit(model, make_data(2))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.keras")
        model.save(path)
        loaded = hvd.load_model(path, custom_optimizers=[Custom])
    assert type(loaded.optimizer) is Custom
    fit(loaded, make_data(2))
    hvd.check_replicas(loaded)


def check_a_file_that_one_rank_lacks_raises_on_both():
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.keras")
        if hvd.rank() == 0:
            compile_model(build_model(), keras.optimizers.SGD(0.1)).save(path)
        with pytest.raises(ValueError, match="not found"):
            hvd.load_model(path)


def check_a_model_saved_without_an_optimizer_loads():
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.keras")
        build_model().save(path)
        assert getattr(hvd.load_model(path), "optimizer", None) is None


def check_weights_clones_and_json():
    model = compile_model(build_model(), _wrap())
    fit(model, make_data(2))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.weights.h5")
        model.save_weights(path)
        other = compile_model(build_model(seed=5), _wrap())
        other.load_weights(path)
    for ours, theirs in zip(read_weights(other), read_weights(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(keras.models.clone_model(model).layers) == 2
    assert "hvdkit" not in model.to_json()
    assert "hvdkit" not in str(model.get_compile_config())
    assert len(keras.models.model_from_json(model.to_json()).layers) == 2


def check_copies_of_an_optimizer_are_plain():
    model = compile_model(build_model(), _wrap())
    fit(model, make_data(2))
    optimizer = model.optimizer
    copies = [
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
        type(optimizer).from_config(optimizer.get_config()),
        keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
        copy.deepcopy(model).optimizer,
        pickle.loads(pickle.dumps(model)).optimizer,
    ]
    for index, plain in enumerate(copies):
        assert isinstance(plain, keras.optimizers.Adam), index
        assert "_hvdkit" not in vars(plain), index
        assert float(plain.learning_rate) == pytest.approx(0.01)
        hvd.DistributedOptimizer(plain)
    for index in (4, 5):
        assert int(copies[index].iterations) == 2


def check_an_optimizer_that_was_compiled_before_it_was_wrapped():
    data = make_data(4)
    reference = compile_model(build_model(), keras.optimizers.SGD(0.1, momentum=0.9))
    fit(reference, data, whole=True)
    # Never run yet, with the choice for XLA made as on a machine with GPUs.
    model = compile_model(build_model(), keras.optimizers.SGD(0.1, momentum=0.9), jit_compile=True)
    hvd.DistributedOptimizer(model.optimizer)
    assert not model.jit_compile
    fit(model, data)
    assert_equal_models(model, reference)
    # Run before, on the same data everywhere, in batches of the size that follows: the step that
    # was traced then must not be used.
    same = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    model = compile_model(build_model(), keras.optimizers.SGD(0.1, momentum=0.9))
    reference = compile_model(build_model(), keras.optimizers.SGD(0.1, momentum=0.9))
    for either in (model, reference):
        either.fit(*data, **same)
    hvd.DistributedOptimizer(model.optimizer)
    fit(model, data)
    fit(reference, data, whole=True)
    assert_equal_models(model, reference)


def check_a_demand_for_xla_is_refused():
    for make in (
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ):
        with pytest.raises(HvdkitError, match="jit_compile=True cannot work"):
            compile_model(build_model(), _wrap(make), jit_compile=True)
    model = compile_model(build_model(), _wrap(), jit_compile="auto")
    assert not model.jit_compile
    # Other models keep their choice.
    assert compile_model(build_model(), keras.optimizers.SGD(0.1), jit_compile=True).jit_compile


def check_the_choice_for_xla_survives_neither_wrapping_nor_loading():
    if not TENSORFLOW:
        return
    model = compile_model(build_model(), keras.optimizers.SGD(0.1), jit_compile=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.keras")
        model.save(path)
        loaded = hvd.load_model(path)
    assert not loaded.jit_compile
    fit(loaded, make_data(2))
    hvd.check_replicas(loaded)


if __name__ == "__main__":
    run_checks(globals())
