"""Leave out updates whose gradients are not finite, inside of a compiled step too."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hvdkit.keras.backend import (
    allreduce_tensors,
    cast,
    is_sparse,
    is_tensorflow,
    keep_as_written,
)
from hvdkit.keras.distribution import find_distribution, list_steppers

__all__ = ["UpdateGuard"]


class UpdateGuard:
    """Counts updates that are not finite, and leaves them out; hangs on optimizers.

    What has happened is kept in variables, since a compiled step tells nothing else.
    """

    def __init__(self) -> None:
        self._bad = _make_variable(0, "int32")  # updates whose gradients were not finite
        self._own = _make_variable(0, "int32")  # those where this rank's own were not
        self._losses = _make_variable(0, "int32")  # losses of this rank that were not
        # When this rank's gradients were; a compiled step needs a variable for that, too.
        self._ready: Any = _make_variable(0.0, "float64") if is_tensorflow() else 0.0
        self._permitted: Any = None
        self._sent: list[Any] = []
        self._received: list[Any] = []

    # -- what happened, outside of compiled steps ------------------------------------------

    def read_counts(self) -> tuple[int, int, int]:
        """Return how many updates, of this rank's own gradients, and of its losses were bad."""
        bad, own, losses = (
            int(ops.convert_to_numpy(one)) for one in (self._bad, self._own, self._losses)
        )
        return bad, own, losses

    def read_ready_s(self) -> float:
        """Return when this rank's gradients were last ready, in seconds since the epoch."""
        return float(self._ready.numpy()) if is_tensorflow() else float(self._ready)

    # -- within the step -------------------------------------------------------------------

    def watch(self, loss: Any) -> Any:
        """Return a loss, as NaN if it is not finite, and count that; works when compiled."""
        loss = ops.convert_to_tensor(loss)
        finite = ops.isfinite(loss)
        self._losses.assign_add(ops.cast(ops.logical_not(ops.all(finite)), "int32"))
        self.note_ready([loss])
        return loss * ops.where(finite, ops.ones_like(loss), ops.full_like(loss, np.nan))

    def note_sent(self, tensors: Sequence[Any]) -> None:
        """Note what this rank is about to send."""
        self._sent += tensors
        if is_tensorflow():
            self.note_ready(tensors)

    def note_received(self, tensors: Sequence[Any]) -> None:
        """Note what came back, the same on every rank."""
        self._received += tensors

    def note_ready(self, tensors: Sequence[Any]) -> None:
        """Note that with these this rank's own part of the step is done: now it waits."""
        if not is_tensorflow():
            self._ready = time.time()
            return
        import tensorflow as tf

        values = [_get_values(tensor) for tensor in tensors]
        with tf.device("/CPU:0"), tf.control_dependencies(values):
            self._ready.assign(tf.timestamp())

    def judge(
        self, more: Sequence[Any], own: Sequence[Any], process_set: Any = None, name: str = ""
    ) -> None:
        """Decide about the update that comes, by what was received.

        Args:
            more: What is applied beside that.
            own: Of it, what this rank has computed itself.
            process_set: Whose ranks have to agree, where ``more`` is not the same on all.
            name: Names that operation.
        """
        finite = _are_finite([*self._received, *more])
        own = [*self._sent, *own]
        self._sent, self._received = [], []
        if process_set is not None:
            [bad_ranks] = allreduce_tensors(
                [1.0 - ops.cast(finite, "float32")], [name], process_set=process_set
            )
            finite = ops.equal(bad_ranks, 0.0)
        bad = ops.cast(ops.logical_not(finite), "int32")
        self._bad.assign_add(bad)
        # An overflow of this quick sum would only blame a rank beside the one that is to blame.
        self._own.assign_add(bad * ops.cast(ops.logical_not(ops.isfinite(_add_up(own))), "int32"))
        self._permitted = finite

    def attach(self, optimizer: Any) -> None:
        """Hang on an optimizer, distributed or plain."""
        distribution = find_distribution(optimizer)
        for one in list_steppers(optimizer):
            _attach_to(one, self, getattr(one, "_hvdkit", None) or distribution)

    def detach(self, optimizer: Any) -> None:
        """Let an optimizer go; what is compiled already keeps the guard."""
        for one in list_steppers(optimizer):
            if getattr(one, "_hvdkit_guard", None) is self:
                object.__setattr__(one, "_hvdkit_guard", None)

    def _choose(self, act: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
        if self._permitted is None:
            act()
            return

        def call(function: Callable[[], Any]) -> Callable[[], None]:
            def branch() -> None:
                function()

            return branch

        ops.cond(self._permitted, call(act), call(otherwise))


def _attach_to(optimizer: Any, guard: UpdateGuard, distribution: Any) -> None:
    if hasattr(optimizer, "_hvdkit_guard"):
        object.__setattr__(optimizer, "_hvdkit_guard", guard)
        return
    inner = type(optimizer)
    bound = vars(optimizer).get("_clip_gradients")  # the reduction, if it is distributed
    clip = bound or types.MethodType(inner._clip_gradients, optimizer)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        guard = self._hvdkit_guard
        if distribution is not None:
            distribution.guard = guard  # which judges between reduction and clipping
        elif guard is not None:
            guard.judge(grads, [])
        return clip(grads)

    def _apply_weight_decay(self: Any, variables: Any) -> None:
        if self._hvdkit_guard is None:
            inner._apply_weight_decay(self, variables)
        elif self.weight_decay is not None:
            self._hvdkit_guard._choose(
                lambda: inner._apply_weight_decay(self, variables), lambda: None
            )

    def _backend_update_step(self: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
        def update() -> None:
            inner._backend_update_step(self, grads, variables, learning_rate)

        def leave_out() -> None:
            if not self.gradient_accumulation_steps:
                self._iterations.assign_sub(1)  # it is counted at the end
                return
            # Accumulation goes by the number of calls, skipped or not. It starts anew from zeros:
            # on PyTorch Keras only multiplies by them, which leaves NaN what it is.
            for gradient in self._accumulated_gradients:
                if gradient is not None:
                    gradient.assign(ops.zeros_like(gradient))

        if self._hvdkit_guard is None:
            update()
        else:
            self._hvdkit_guard._choose(update, leave_out)

    for method in (_clip_gradients, _apply_weight_decay, _backend_update_step):
        object.__setattr__(
            optimizer, method.__name__, types.MethodType(keep_as_written(method), optimizer)
        )
    object.__setattr__(optimizer, "_hvdkit_guard", guard)


def _make_variable(value: float, dtype: str) -> Any:
    return keras.Variable(value, dtype=dtype, trainable=False, name="hvdkit_health")


def _get_values(gradient: Any) -> Any:
    return gradient.values if is_sparse(gradient) else gradient


def _add_up(gradients: Sequence[Any]) -> Any:
    """Return a number that is not finite if one in the gradients is not; it may overflow."""
    sums = []
    for one in gradients:
        values = _get_values(one)
        narrow = keras.backend.standardize_dtype(values.dtype) in ("float16", "bfloat16")
        sums.append(cast(ops.sum(cast(values, "float32") if narrow else values), "float32"))
    return ops.sum(ops.stack(sums)) if sums else ops.convert_to_tensor(0.0)


def _are_finite(gradients: Sequence[Any]) -> Any:
    """Whether all numbers are finite: by a sum, and only where that is not, one by one."""

    def look() -> Any:
        return ops.all(ops.stack([ops.all(ops.isfinite(_get_values(one))) for one in gradients]))

    if not gradients:
        return ops.convert_to_tensor(True)
    return ops.cond(ops.isfinite(_add_up(gradients)), lambda: ops.convert_to_tensor(True), look)
