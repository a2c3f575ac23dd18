"""What makes one Keras optimizer distributed, and how it hangs on the object."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hvdkit.errors import HvdkitError
from hvdkit.keras.backend import is_tensorflow, make_dense, scale, sum_array
from hvdkit.keras.hyper_parameters import agree_on_hyper_parameters
from hvdkit.keras.reduction import ReductionOptions, reduce_gradients

__all__ = ["Distribution", "attach", "find_distribution", "find_held", "list_steppers"]


class Distribution:
    """What makes one optimizer distributed; hangs on it as ``_hvdkit``."""

    def __init__(
        self,
        options: ReductionOptions,
        alone: bool,
        clip_grad_norm: float | None,
        passes_to_sum: int,
        scale_local_gradients: bool,
    ) -> None:
        self.options = options
        self.alone = alone
        self.clip_grad_norm = clip_grad_norm
        self.passes_to_sum = passes_to_sum
        self.scale_local_gradients = scale_local_gradients
        self.local_variables: list[Any] = []
        self.variables: list[Any] = []  # those of the update under way
        self.guard: Any = None  # an UpdateGuard, if updates are watched
        self.agreed = alone  # on hyper-parameters

    def is_local(self, variable: Any) -> bool:
        """Whether the gradient of ``variable`` stays on this rank."""
        return any(variable is local for local in self.local_variables)

    def reduce(self, gradients: Sequence[Any], optimizer: Any) -> list[Any]:
        """Return the gradients that the update takes."""
        results = list(gradients)
        if not self.agreed:
            agree_on_hyper_parameters(optimizer, self.options.name, self.options.process_set)
            self.agreed = True
        shared = [
            index for index, variable in enumerate(self.variables) if not self.is_local(variable)
        ]
        if not self.alone and shared:
            reduced = reduce_gradients(
                [results[index] for index in shared],
                self.options,
                [self.variables[index] for index in shared],
                self.guard,
            )
            for index, gradient in zip(shared, reduced, strict=True):
                results[index] = gradient
        if self.guard is not None:
            self._judge(results, [] if self.alone else shared)
        if self.scale_local_gradients and not self.alone:
            ranks = self.options.process_set.size()
            for index in set(range(len(results))) - set(shared):
                results[index] = scale(results[index], 1 / ranks)
        if self.passes_to_sum > 1:
            results = [scale(gradient, self.passes_to_sum) for gradient in results]
        if self.clip_grad_norm is not None:
            results = _clip(results, self.clip_grad_norm)
        return results

    def _judge(self, results: list[Any], shared: list[int]) -> None:
        """Let the guard decide; where gradients are local, together with the other ranks."""
        local = [results[index] for index in range(len(results)) if index not in set(shared)]
        options = self.options
        agree = local and not self.alone
        self.guard.judge(
            local, local, options.process_set if agree else None, f"{options.name}.finite"
        )

    def reduce_overwriting(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce what overwrites its variable, which Keras does without an update."""
        results = list(gradients)
        indices = [
            index
            for index, variable in enumerate(variables)
            if getattr(variable, "overwrite_with_gradient", False) and not self.is_local(variable)
        ]
        if indices and not self.alone:
            reduced = reduce_gradients(
                [results[index] for index in indices],
                self.options,
                [variables[index] for index in indices],
            )
            for index, gradient in zip(indices, reduced, strict=True):
                results[index] = gradient
        return results

    def fill_absent(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Replace None by zeros where another rank has a gradient.

        On TensorFlow a missing gradient is a property of the graph, the same on every rank; on
        PyTorch it depends on what the forward pass did.
        """
        results = list(gradients)
        if self.alone or is_tensorflow():
            return results
        if self.guard is not None:
            self.guard.note_ready(results)
        process_set = self.options.process_set
        present = np.array([gradient is not None for gradient in results], np.int32)
        holders = sum_array(present, name=f"{self.options.name}.present", process_set=process_set)
        for index, variable in enumerate(variables):
            if results[index] is None and holders[index]:
                results[index] = ops.zeros(variable.shape, variable.dtype)
        return results


def find_distribution(optimizer: object) -> Distribution | None:
    """Return what ``DistributedOptimizer`` hung on ``optimizer``, or on the one that it holds."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    candidates = (getattr(one, "_hvdkit", None) for one in (inner, *find_held(inner)))
    return next((one for one in candidates if one is not None), None)


def find_held(optimizer: Any) -> list[Any]:
    """Return the optimizers that one holds which hands gradients on, as ``MultiOptimizer`` does."""
    plain, cls = keras.optimizers.Optimizer, type(optimizer)
    if not isinstance(optimizer, plain) or (
        cls.apply is plain.apply and cls.apply_gradients is plain.apply_gradients
    ):
        return []
    held = keras.tree.flatten(
        [one for one in vars(optimizer).values() if isinstance(one, (plain, list, tuple, dict))]
    )
    distinct = {id(one): one for one in held if isinstance(one, plain) and one is not optimizer}
    return list(distinct.values())


def list_steppers(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables: one, or those that it holds."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return find_held(inner) or [inner]


def attach(optimizer: Any, distribution: Distribution, passes: int) -> None:
    """Make ``optimizer`` reduce as ``distribution`` says, once for ``passes`` calls.

    Raises:
        HvdkitError: It accumulates over another number of calls already, or is built.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    _attach_to(inner, distribution)
    if hasattr(inner, "optimizers") or find_held(inner):
        _attach_to_each(inner, distribution)
    if passes > 1:
        _accumulate(inner, passes)
        _count_updates(inner)


def _attach_to(optimizer: Any, distribution: Distribution) -> None:
    """Bind the reduction to the one object, so that its class and configuration stay plain."""
    inner = type(optimizer)

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        self._hvdkit.variables = list(trainable_variables)
        return inner._backend_apply_gradients(self, grads, trainable_variables)

    # Every update passes here once, with accumulated gradients if Keras accumulates, before
    # clipping and weight decay.
    def _clip_gradients(self: Any, grads: Any) -> Any:
        return inner._clip_gradients(self, self._hvdkit.reduce(grads, self))

    # Not part of the update, and so not clipped.
    def _overwrite_variables_directly_with_gradients(self: Any, grads: Any, variables: Any) -> Any:
        grads = self._hvdkit.reduce_overwriting(grads, variables)
        return inner._overwrite_variables_directly_with_gradients(self, grads, variables)

    def _filter_empty_gradients(self: Any, grads: Any, variables: Any) -> Any:
        grads = self._hvdkit.fill_absent(grads, variables)
        return inner._filter_empty_gradients(self, grads, variables)

    def register_local_var(self: Any, var: Any) -> None:
        self._hvdkit.local_variables.append(var)

    # Not the optimizer's own __setattr__, which tracks what it is given as state to save.
    for method in (
        _backend_apply_gradients,
        _clip_gradients,
        _filter_empty_gradients,
        _overwrite_variables_directly_with_gradients,
        register_local_var,
    ):
        object.__setattr__(optimizer, method.__name__, types.MethodType(method, optimizer))
    object.__setattr__(optimizer, "_hvdkit", distribution)


def _attach_to_each(optimizer: Any, distribution: Distribution) -> None:
    """Let each optimizer in another reduce, which hands the gradients on to them."""

    def attach_all(self: Any) -> None:
        for index, one in enumerate(find_held(self)):
            if find_distribution(one) is None:
                own = copy.copy(distribution)  # the local variables remain shared
                name = f"{distribution.options.name}.{index}"
                own.options = dataclasses.replace(distribution.options, name=name)
                _attach_to(one, own)

    def build(self: Any, var_list: Any) -> None:
        type(self).build(self, var_list)
        attach_all(self)  # some are made here, by the variables

    attach_all(optimizer)
    object.__setattr__(optimizer, "build", types.MethodType(build, optimizer))


def _accumulate(optimizer: Any, passes: int) -> None:
    if optimizer.gradient_accumulation_steps == passes:
        return  # wrapped with the same number before it was saved or copied
    if optimizer.gradient_accumulation_steps:
        raise HvdkitError(
            f"the optimizer accumulates over {optimizer.gradient_accumulation_steps} passes "
            f"already (gradient_accumulation_steps), and not over {passes}; set either"
        )
    if optimizer.built:
        raise HvdkitError(
            "backward_passes_per_step needs an optimizer that is not built yet: wrap it before "
            "the first step, or create it with gradient_accumulation_steps"
        )
    optimizer.gradient_accumulation_steps = passes


def _count_updates(optimizer: Any) -> None:
    """Let a schedule count updates; Keras's own accumulation lets it count calls."""
    inner = type(optimizer)

    def _get_current_learning_rate(self: Any) -> Any:
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return self._learning_rate(self.iterations)
        return inner._get_current_learning_rate(self)

    method = types.MethodType(_get_current_learning_rate, optimizer)
    object.__setattr__(optimizer, "_get_current_learning_rate", method)


def _clip(gradients: list[Any], limit: float) -> list[Any]:
    dense = [make_dense(gradient) for gradient in gradients]
    squares = [ops.sum(ops.square(ops.cast(gradient, "float32"))) for gradient in dense]
    norm = ops.sqrt(sum(squares[1:], squares[0]))
    factor = ops.minimum(limit / (norm + 1e-6), 1.0)
    return [
        scale(gradient, ops.cast(factor, keras.backend.standardize_dtype(gradient.dtype)))
        for gradient in gradients
    ]
