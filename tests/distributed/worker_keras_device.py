"""Device and threads of two Keras workers on one host, on either backend."""

import os
import warnings

import keras
import pytest

import hvdkit.keras as hvd
from hvdkit.errors import EnvironmentMismatchError, HvdkitError
from tests.distributed.worker import run_checks

CORES = len(os.sched_getaffinity(0))
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"

if ON_TENSORFLOW:
    import tensorflow as tf

    count_threads = tf.config.threading.get_intra_op_parallelism_threads
else:
    import torch

    count_threads = torch.get_num_threads


def pretend_to_have_gpus(patch, count):
    """Let the framework see ``count`` GPUs; return the list of those that are pinned."""
    pinned = []
    if ON_TENSORFLOW:
        gpus = [f"GPU {index}" for index in range(count)]
        patch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
        patch.setattr(
            tf.config, "set_visible_devices", lambda one, kind: pinned.extend(map(gpus.index, one))
        )
        patch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, on: None)
    else:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "set_device", pinned.append)
    return pinned


def check_threads_share_the_cores():
    os.environ.pop("OMP_NUM_THREADS", None)
    share = max(1, CORES // hvd.local_size())
    assert hvd.set_threads() == share
    assert count_threads() == share


def check_the_variable_wins_over_the_share():
    for value in ("1", "1,2"):
        os.environ["OMP_NUM_THREADS"] = value
        assert hvd.set_threads() == 1
        assert count_threads() == 1


def check_too_many_threads_are_named_once_a_host():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hvd.set_threads(CORES) == CORES
    named = [warning for warning in caught if "threads each share" in str(warning.message)]
    if hvd.local_rank() == 0:
        [warning] = named
        expected = f"{hvd.local_size()} workers with {CORES} threads each share {CORES} cores"
        assert expected in str(warning.message)
        assert warning.filename == __file__
    else:
        assert named == []
    hvd.set_threads(1)


def check_threads_below_one_are_refused():
    with pytest.raises(ValueError, match="at least 1 thread; got 0"):
        hvd.set_threads(0)


def check_more_workers_than_gpus_fail_on_all_of_them():
    # One GPU, whatever this machine has: the error must come on both ranks alike.
    with pytest.MonkeyPatch.context() as patch:
        pretend_to_have_gpus(patch, 1)
        for kind in ("auto", "cuda"):
            with pytest.raises(EnvironmentMismatchError, match=r"2 workers .* sees 1 GPUs"):
                hvd.pick_device(kind)


def check_a_gpu_goes_by_local_rank():
    with pytest.MonkeyPatch.context() as patch:
        pinned = pretend_to_have_gpus(patch, 2)
        # TensorFlow counts what it is left to see.
        number = 0 if ON_TENSORFLOW else hvd.local_rank()
        assert hvd.pick_device() == f"gpu:{number}"
    assert pinned == [hvd.local_rank()]


def check_the_cpu_is_there_when_asked_for():
    assert hvd.pick_device("cpu") == "cpu"
    assert "cpu" in str(keras.ops.ones(3).device).lower()
    with pytest.raises(ValueError, match="'auto', 'cpu' or 'cuda'; got 'tpu'"):
        hvd.pick_device("tpu")


def check_a_running_tensorflow_is_named_as_what_is_too_late():
    keras.ops.ones(3)
    assert hvd.set_threads(1) == 1  # as it is
    if ON_TENSORFLOW:
        # Raised before the warning that there are too many.
        with pytest.raises(HvdkitError, match=r"hvd.set_threads\(\) right after hvd.init\(\)"):
            hvd.set_threads(CORES + 1)


if __name__ == "__main__":
    run_checks(globals())
