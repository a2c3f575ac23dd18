"""Prove that all ranks hold the same model, once or every so many steps."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import keras
import numpy as np

from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError
from hvdkit.events import EventLog
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import broadcast_bytes, hvd
from hvdkit.keras.checkpoint import CheckpointStore
from hvdkit.keras.collectives import gather_over
from hvdkit.keras.digest import digest_variables
from hvdkit.keras.distribution import find_distribution
from hvdkit.keras.hyper_parameters import describe_hyper_parameters
from hvdkit.keras.rollback import roll_back
from hvdkit.keras.state import (
    broadcast_variables,
    describe_variable,
    name_slots,
    name_variables,
    read_variable,
)
from hvdkit.replicas import DEFAULT_STEPS, PeriodicCheck, demand_equal_replicas

__all__ = ["ReplicaCheck", "check_replicas"]


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
    _compare("check_replicas", model, buffers, optimizer, process_set)


def _compare(name: str, model: Any, buffers: bool, optimizer: Any, process_set: Any) -> None:
    named = _list_variables(model, buffers, optimizer)
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


def _list_variables(model: Any, buffers: bool, optimizer: Any) -> list[tuple[str, Any]]:
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


class ReplicaCheck(PeriodicCheck):
    """Compares the replicas every ``steps`` calls of ``step()``, to the last bit.

    For loops of your own: call ``step()`` after each step, outside of ``tf.function``. In ``fit``
    use ``callbacks.ReplicaCheckCallback``, which takes the same options.

    If replicas differ, ``on_mismatch`` says what happens:

    * ``"raise"``: ``ReplicaMismatchError`` on every rank;
    * ``"resync"``: every rank takes over what the first rank holds of all that is compared;
    * ``"rollback"``: every rank goes back to the last good checkpoint of ``store``, and
      ``restored`` is what it says.

    Collective in the first step and where a check is due: every rank must make the same steps. In
    an elastic job call ``restart()`` when ranks have come or gone.

    Args:
        model: The replica of this rank.
        optimizer: Its variables and hyper-parameters are compared as well. By default the one that
            the model was compiled with, if any.
        steps: Steps between two checks, each of which reads everything once.
        buffers: Compare the other variables as well; see ``check_replicas``.
        on_mismatch: See above.
        store: For ``"rollback"``; holds checkpoints of ``model`` and ``optimizer``.
        events: Where a mismatch is told, beside Python logging, by the first rank.
        process_set: The ranks to compare; on others the object does nothing.

    Attributes:
        steps_seen: Steps counted so far.
        mismatches: How often replicas differed.
        restored: What the last rollback returned, else None.

    Raises:
        HvdkitError: An argument is out of range, or ``"rollback"`` lacks a store.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        steps: int = DEFAULT_STEPS,
        buffers: bool = False,
        on_mismatch: str = "raise",
        store: CheckpointStore | None = None,
        events: EventLog | None = None,
        process_set: Any = hvd.global_process_set,
    ) -> None:
        super().__init__(steps, on_mismatch, store, events)
        self._model, self._optimizer, self._buffers = model, optimizer, buffers
        self._process_set = process_set

    def step(self) -> None:
        """Count a step, and compare if the check is due; see the base class."""
        if self._process_set.included():
            super().step()

    def watch(self, model: Any) -> None:
        """Compare another model from here on."""
        self._model = model

    def _find_optimizer(self) -> Any:
        optimizer = self._optimizer or getattr(self._model, "optimizer", None)
        return optimizer if isinstance(optimizer, keras.optimizers.Optimizer) else None

    def _agree(self, options: list[tuple[str, str]]) -> None:
        if not is_elastic() and self._process_set.size() > 1:
            demand_equal_entries(
                "ReplicaCheck",
                [
                    *options,
                    ("buffers", str(self._buffers)),
                    ("optimizer", str(self._find_optimizer() is not None)),
                ],
                name="replica_check.options",
                process_set=self._process_set,
            )

    def _compare(self, name: str) -> None:
        _compare(name, self._model, self._buffers, self._find_optimizer(), self._process_set)

    def _resync(self) -> None:
        named = _list_variables(self._model, self._buffers, self._find_optimizer())
        broadcast_variables(
            [variable for _, variable in named], self._process_set.ranks[0], self._process_set
        )

    def _roll_back(self) -> dict[str, Any]:
        return roll_back(
            self.store, self._model, self._find_optimizer(), process_set=self._process_set
        )

    def _speaks(self) -> bool:
        return bool(hvd.rank() == self._process_set.ranks[0])
