"""Where a worker computes: the GPU that its local rank pins, and its share of the cores."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import keras

from hvdkit.errors import EnvironmentMismatchError, HvdkitError
from hvdkit.keras.backend import hvd, is_tensorflow
from hvdkit.tuning import say_too_few_gpus, share_cores, warn_of_too_many_threads

__all__ = ["pick_device", "set_threads"]

# Holds the scope that makes a device the default of Keras on PyTorch.
_default_device = contextlib.ExitStack()


def pick_device(kind: str = "auto") -> str:
    """Make this worker's device the one that Keras computes on; return its name.

    Call it after ``init()`` and before the first tensor is made. Workers of one host get one GPU
    each, by local rank.

    Args:
        kind: ``"cuda"``, ``"cpu"``, or ``"auto"`` for a GPU where the framework sees any.

    Returns:
        A name that ``keras.device`` takes: ``"cpu"``, or ``"gpu:0"`` and so on. TensorFlow sees
        only the GPU of this worker afterwards, and counts it as the first.

    Raises:
        EnvironmentMismatchError: this host runs more workers than the framework sees GPUs.
        HvdkitError: TensorFlow has set up its devices already.
        ValueError: another ``kind``.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device kind must be 'auto', 'cpu' or 'cuda'; got {kind!r}")
    gpus = [] if kind == "cpu" else _list_gpus()
    if kind == "cpu" or (kind == "auto" and not gpus):
        return _use(None)
    workers = int(hvd.local_size())
    # Compare the counts, not this rank with the count, so that all workers of the host agree.
    if workers > len(gpus):
        raise EnvironmentMismatchError(
            say_too_few_gpus(workers, len(gpus), keras.backend.backend())
        )
    return _use(gpus[hvd.local_rank()])


def set_threads(threads: int | None = None) -> int:
    """Set how many threads Keras's framework computes with in this worker; return the number.

    Call it after ``init()`` and before the first tensor is made. By default a worker gets its
    share of the cores that it may run on (cores over local size, at least one), unless
    ``OMP_NUM_THREADS`` already says otherwise. Local rank 0 warns when the workers of this host
    ask for more threads than there are cores.

    Raises:
        HvdkitError: TensorFlow has started its threads already, another number of them.
        ValueError: ``threads`` below one.
    """
    workers = int(hvd.local_size())
    if threads is None:
        # One number, or one a level of nested parallelism.
        from_variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = int(from_variable) if from_variable.isdecimal() else share_cores(workers)
    if threads < 1:
        raise ValueError(f"a worker needs at least 1 thread; got {threads}")
    if is_tensorflow():
        import tensorflow as tf

        with _before_tensorflow_starts("set_threads"):
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    else:
        import torch

        torch.set_num_threads(threads)
    if hvd.local_rank() == 0:
        warn_of_too_many_threads(threads, workers)
    return threads


def _list_gpus() -> list[Any]:
    if is_tensorflow():
        import tensorflow as tf

        return list(tf.config.list_physical_devices("GPU"))
    import torch

    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []


def _use(gpu: Any) -> str:
    if is_tensorflow():
        import tensorflow as tf

        with _before_tensorflow_starts("pick_device"):
            tf.config.set_visible_devices([] if gpu is None else [gpu], "GPU")
            if gpu is not None:
                # Otherwise TensorFlow takes all of the memory, and NCCL needs some.
                tf.config.experimental.set_memory_growth(gpu, True)
        return "cpu" if gpu is None else "gpu:0"
    name = "cpu"
    if gpu is not None:
        import torch

        torch.cuda.set_device(gpu)
        name = f"gpu:{gpu}"
    _default_device.close()
    _default_device.enter_context(keras.device(name))
    return name


@contextlib.contextmanager
def _before_tensorflow_starts(function: str) -> Any:
    try:
        yield
    except RuntimeError as error:
        raise HvdkitError(
            f"TensorFlow is set up already ({error}): call hvd.{function}() right after "
            "hvd.init(), before anything makes a tensor or a variable"
        ) from error
