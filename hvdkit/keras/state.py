"""What every rank's model must start with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.errors import HvdkitError
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import broadcast_bytes, hvd
from hvdkit.keras.collectives import allgather_object
from hvdkit.keras.hyper_parameters import describe_hyper_parameters
from hvdkit.keras.layout import list_versions

__all__ = [
    "broadcast_initial_state",
    "broadcast_variables",
    "describe_variable",
    "name_dtype",
    "name_slots",
    "name_variables",
    "read_variable",
]

CHUNK_BYTES = 128 * 2**20

_NUMBER = re.compile(r"_\d+(?=[/_:]|$)")


def broadcast_initial_state(
    model: Any,
    optimizer: Any = None,
    root_rank: int = 0,
    process_set: Any = hvd.global_process_set,
    *,
    local_variables: Iterable[Any] = (),
) -> None:
    """Give every rank the variables that the root has: of the model and of its optimizer.

    Weights, batch-norm statistics, seeds, and of the optimizer slots, iterations and learning
    rate. Takes no step, and changes nothing on the root.

    Collective: every rank of ``process_set`` must call.

    Args:
        model: A built Keras model.
        optimizer: By default the one that the model was compiled with, if any. One that is
            built on the root only is built on the others.
        root_rank: The rank, global, that the others copy.
        process_set: The ranks that take part.
        local_variables: Variables that keep what they hold.

    Raises:
        HvdkitError: The model has no variables yet, or the optimizer is not one of Keras 3.
        RankDisagreementError: Ranks hold other names, shapes or dtypes, or their optimizers
            have other hyper-parameters that are no variables, or versions differ.
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if not model.built:
        raise HvdkitError(
            "the model has no variables yet; give it an Input, or call it on a batch, first"
        )
    if optimizer is not None:
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise HvdkitError(
                f"expected an optimizer of Keras 3, got {type(optimizer).__module__}."
                f"{type(optimizer).__qualname__}; for tf_keras use broadcast_variables, or "
                f"callbacks.BroadcastGlobalVariablesCallback of hvdkit.tensorflow.keras"
            )
        built = allgather_object(
            bool(optimizer.built), name="initial_state.built", process_set=process_set
        )
        if any(built) and not optimizer.built:
            optimizer.build(model.trainable_variables)
    kept = {id(variable) for variable in local_variables}
    named = name_variables(v for v in model.variables if id(v) not in kept)
    if optimizer is not None:
        named += name_slots(v for v in optimizer.variables if id(v) not in kept)
    # What a broadcast cannot make equal, and nothing else would compare in an elastic job or
    # where a tape reduces.
    fixed = list_versions() + (describe_hyper_parameters(optimizer) if optimizer else [])
    _broadcast(named, root_rank, process_set, fixed)


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: Any = hvd.global_process_set,
    inplace: bool = True,
) -> None:
    """Overwrite variables on every rank with the bits that they have on the root.

    All travel together, in pieces of at most 128 MiB.

    Collective: every rank of ``process_set`` must call, outside of ``tf.function``.

    Args:
        variables: Keras or TensorFlow variables, of the same shapes, dtypes and order on all
            ranks.
        root_rank: The rank, global, that the others copy.
        process_set: The ranks that take part.
        inplace: Horovod's option; values are always assigned.

    Raises:
        RankDisagreementError: Ranks hold other shapes or dtypes.
        HvdkitError: On every rank, if a variable holds text, or the root is none of the ranks.
    """
    _broadcast(name_variables(variables), root_rank, process_set)


def _broadcast(
    named: Sequence[tuple[str, Any]],
    root_rank: int,
    process_set: Any,
    fixed: Sequence[tuple[str, str]] = (),
) -> None:
    if root_rank not in process_set.ranks:
        raise HvdkitError(f"root_rank {root_rank} is none of the ranks {process_set.ranks}")
    demand_equal_entries(
        "What is broadcast",
        [*((name, describe_variable(v)) for name, v in named), *fixed],
        name="broadcast_variables",
        process_set=process_set,
    )
    for name, variable in named:
        if name_dtype(variable) == "string":
            raise HvdkitError(
                f"variable {name} holds text, which cannot be broadcast; send it with "
                "broadcast_object"
            )
    is_root = hvd.rank() == root_rank
    chunk: list[Any] = []
    size = 0
    for _, variable in named:
        chunk.append(variable)
        size += read_variable(variable).nbytes
        if size >= CHUNK_BYTES:
            _broadcast_chunk(chunk, root_rank, is_root, process_set)
            chunk, size = [], 0
    if chunk:
        _broadcast_chunk(chunk, root_rank, is_root, process_set)


def _broadcast_chunk(
    variables: Sequence[Any], root_rank: int, is_root: bool, process_set: Any
) -> None:
    arrays = [read_variable(variable) for variable in variables]
    flat = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
    received = broadcast_bytes(flat, root_rank, name="broadcast_variables", process_set=process_set)
    if is_root:
        return
    start = 0
    for variable, array in zip(variables, arrays, strict=True):
        end = start + array.nbytes
        variable.assign(received[start:end].view(array.dtype).reshape(array.shape))
        start = end


def name_variables(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return variables with names that are the same on every rank: position and path.

    Without the numbers that Keras gives to layers in the order in which a process makes them:
    a rank may have made other models before.
    """
    return [
        (f"{position} ({_NUMBER.sub('', str(getattr(v, 'path', v.name)))})", v)
        for position, v in enumerate(variables)
    ]


def name_slots(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the variables of an optimizer with such names, without the scopes around them.

    Those depend on who built it: ``build``, or the first step of the optimizer around it, which
    a ``LossScaleOptimizer`` is.
    """
    return [
        (f"{position} ({_NUMBER.sub('', str(getattr(v, 'path', v.name))).rsplit('/', 1)[-1]})", v)
        for position, v in enumerate(variables)
    ]


def read_variable(variable: Any) -> np.ndarray:
    """Return the bits of a variable as an array, which may share its memory."""
    return np.asarray(variable.numpy(), order="C")


def describe_variable(variable: Any) -> str:
    """Return the dtype and shape of a variable, as ``float32[3, 2]``."""
    return f"{name_dtype(variable)}{list(variable.shape)}"


def name_dtype(variable: Any) -> str:
    """Return the dtype of a Keras or TensorFlow variable, as ``float32``."""
    return str(getattr(variable.dtype, "name", variable.dtype))
