"""Prove that all ranks hold the same model."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import broadcast_bytes, hvd
from hvdkit.keras.collectives import gather_over
from hvdkit.keras.digest import digest_variables
from hvdkit.keras.distribution import find_distribution
from hvdkit.keras.hyper_parameters import describe_hyper_parameters
from hvdkit.keras.state import (
    describe_variable,
    name_slots,
    name_variables,
    read_variable,
)
from hvdkit.replicas import demand_equal_replicas

__all__ = ["check_replicas", "compare_replicas", "list_compared"]


def check_replicas(
    model: Any,
    buffers: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    optimizer: Any = None,
) -> None:
    """Raise unless every rank holds the same trainable variables, to the last bit.

    Compares one digest, so hardly anything travels; every variable is read once. If the digests
    differ the first variable that does is found and sent. Those given to ``register_local_var`` of
    the model's optimizer, and their slots, may differ.

    Collective: every rank of ``process_set`` must call, outside of ``tf.function``.

    Args:
        model: The replica of this rank.
        buffers: Compare the other variables as well. Batch-norm statistics are local to a rank
            in training.
        process_set: The ranks to compare.
        optimizer: Compare its variables and hyper-parameters as well.

    Raises:
        ReplicaMismatchError: On every rank; names the first variable that differs, the ranks that
            hold each version of it and the largest difference.
    """
    compare_replicas("check_replicas", model, buffers, optimizer, process_set)


def compare_replicas(
    name: str, model: Any, buffers: bool, optimizer: Any, process_set: Any
) -> None:
    """Do what ``check_replicas`` does; ``name`` names the operations."""
    named = list_compared(model, buffers, optimizer)
    kinds = [(label, describe_variable(variable)) for label, variable in named]
    texts = [] if optimizer is None else describe_hyper_parameters(optimizer)
    gather = gather_over(process_set)

    def digest() -> bytes:
        for label, kind in kinds:
            if kind.startswith("string"):
                raise HvdkitError(f"variable {label} holds text; only numbers are compared")
        whole = hashlib.sha256(repr((kinds, texts)).encode())
        whole.update(digest_variables(variable for _, variable in named))
        return whole.digest()

    def describe() -> list[tuple[str, str]]:
        return texts + [
            (label, f"{kind} digest {digest_variables([variable]).hex()[:16]}")
            for (label, kind), (_, variable) in zip(kinds, named, strict=True)
        ]

    def measure(index: int, root: int) -> float:
        own = read_variable(named[index - len(texts)][1])
        received = broadcast_bytes(
            own.reshape(-1).view(np.uint8), root, name=f"{name}.reference", process_set=process_set
        )
        return _find_largest(own.reshape(-1), received.view(own.dtype))

    demand_equal_replicas(
        digest, describe, measure, name=name, gather=gather, ranks=process_set.ranks
    )


def list_compared(model: Any, buffers: bool, optimizer: Any) -> list[tuple[str, Any]]:
    """List what replicas hold alike: nothing that is local to a rank or to a pass."""
    distribution = find_distribution(optimizer or getattr(model, "optimizer", None))
    local = getattr(distribution, "local_variables", [])
    kept = {id(variable) for variable in local}
    named = name_variables(model.variables if buffers else model.trainable_variables)
    if optimizer is not None:
        # The name of a slot starts with the path of its variable.
        prefixes = tuple(f"{variable.path.replace('/', '_')}_" for variable in local)
        named += [
            (label, variable)
            for label, variable in name_slots(optimizer.variables)
            if not variable.name.endswith("gradient_accumulator")  # sums of this rank
            and not (prefixes and variable.name.startswith(prefixes))
        ]
    return [(label, variable) for label, variable in named if id(variable) not in kept]


def _find_largest(own: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest absolute difference; NaN where one side alone is NaN."""
    wide = np.complex128 if own.dtype.kind == "c" else np.float64
    a, b = own.astype(wide), reference.astype(wide)
    if (np.isnan(a) != np.isnan(b)).any():
        return math.nan
    unequal = (a != b) & ~np.isnan(a)
    with np.errstate(invalid="ignore"):  # inf - inf, which is not taken
        largest = float(np.abs(a - b)[unequal].max()) if unequal.any() else 0.0
    # Large integers may be one number as float64.
    whole = own.dtype.kind in "iub"
    return 1.0 if whole and largest == 0 and (own != reference).any() else largest
