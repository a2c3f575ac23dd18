"""The random state of every rank, for a checkpoint to hold, on either backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from hvdkit.keras.backend import hvd
from hvdkit.keras.collectives import allgather_object
from hvdkit.keras.state import name_dtype
from hvdkit.random_state import (
    choose_state,
    read_random_state,
    seed_generators,
    set_random_state,
)

__all__ = ["gather_random_state", "read_rank_state", "restore_random_state", "set_rank_state"]

_GLOBAL_SEEDS = "global_seed_generator"
_LARGEST_SEED = 2**31  # seeds of Keras are of 32 bits, on PyTorch with a sign


def gather_random_state(
    model: Any = None, process_set: Any = hvd.global_process_set
) -> list[dict[str, Any]]:
    """Return the random state of every rank, for ``store.save(..., random=...)``.

    That of NumPy's global generator and of Python's ``random``; of Keras's functions without a
    seed; on TensorFlow of ``tf.random.get_global_generator()``; on PyTorch of its generators on
    the CPU and on this rank's CUDA device; and of the seeds in ``model``, such as those of
    dropout. About 14 KiB a rank. ``restore_or_broadcast`` gives it back. With another number of
    ranks, a generator that was the same on all is so again; others are seeded with what follows
    from the saved states and the rank.

    Generators of your own are not in it: save their states as extra. ``tf.random.uniform`` and its
    like keep a state that nothing can read: use ``keras.random``, or a ``tf.random.Generator``.

    Collective: every rank of ``process_set`` must call, outside of ``tf.function``.
    """
    state = read_rank_state(model)
    return allgather_object(state, name="gather_random_state", process_set=process_set)


def read_rank_state(model: Any = None) -> dict[str, Any]:
    """Return the random state of this rank."""
    state = read_random_state()
    generator = global_state.get_global_attribute(_GLOBAL_SEEDS)
    if generator is not None:
        state["keras"] = _read(generator.state)
    if (operations := _find_tensorflow()) and operations.global_generator is not None:
        state["tensorflow"] = _read(operations.global_generator.state)
    if model is not None:
        state["model"] = [_read(variable) for variable in _find_seeds(model)]
    return state


def restore_random_state(
    states: Sequence[dict[str, Any]], model: Any, process_set: Any = hvd.global_process_set
) -> None:
    """Set this rank's generators to what ``gather_random_state`` returned.

    Args:
        states: One for each rank that saved.
        model: Its seeds are set if they were saved.
        process_set: The ranks that restore.
    """
    set_rank_state(model, *choose_state(states, process_set.rank(), process_set.size()))


def set_rank_state(model: Any, state: dict[str, Any], seeds: dict[str, int] | None = None) -> None:
    """Set this rank's generators, and the seeds of ``model``, to what ``read_rank_state`` returned.

    Args:
        model: As it was given there.
        state: What is set.
        seeds: By the same names, what is seeded anew.
    """
    seeds = seeds or {}
    # First what may draw a seed from Python's generator.
    if "keras" in state or "keras" in seeds:
        first = seeds.get("keras", 0) % _LARGEST_SEED
        variable = seed_generator.global_seed_generator().state
        variable.assign(np.array(state.get("keras", [first, 0]), name_dtype(variable)))
    if operations := _find_tensorflow():
        if "tensorflow" in state:
            operations.get_global_generator().state.assign(state["tensorflow"])
        elif "tensorflow" in seeds:
            operations.get_global_generator().reset_from_seed(seeds["tensorflow"])
    for index, variable in enumerate(_find_seeds(model)):
        if "model" in state:
            variable.assign(np.array(state["model"][index], name_dtype(variable)))
        elif "model" in seeds:
            first = (seeds["model"] + index) % _LARGEST_SEED
            variable.assign(np.array([first, 0], name_dtype(variable)))
    set_random_state(state)
    seed_generators(seeds)


def _find_seeds(model: Any) -> list[Any]:
    return [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


def _find_tensorflow() -> Any:
    """Return the module that holds TensorFlow's global generator, if it is loaded."""
    return sys.modules.get("tensorflow.python.ops.stateful_random_ops")


def _read(variable: Any) -> list[int]:
    return [int(number) for number in variable.numpy()]
