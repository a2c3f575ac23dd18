"""Learning rates for large batches: how to scale them with the workers, and how to warm up."""

from __future__ import annotations

import math

from hvdkit.errors import HvdkitError

RULES = ("linear", "sqrt", "none")

__all__ = ["RULES", "scaling_factor", "warmup_factor"]


def scaling_factor(workers: int, rule: str = "linear") -> float:
    """Return what to multiply a single worker's learning rate by.

    Args:
        workers: How many times larger the effective batch is than the one the rate was tuned
            for: the workers, times the accumulated passes where there are any. At least 1.
        rule: ``"linear"`` multiplies by ``workers``: one large step then goes as far as that
            many small ones. ``"sqrt"`` multiplies by its square root, which keeps the variance
            of the update. ``"none"`` leaves the rate alone.

    Raises:
        HvdkitError: If the rule is unknown or ``workers`` is below 1.

    Source: "linear": Goyal et al., Accurate, Large Minibatch SGD (2017). "sqrt": Krizhevsky,
    One weird trick for parallelizing convolutional neural networks (2014).
    """
    if workers < 1:
        raise HvdkitError(f"workers and passes must be at least 1, got {workers} in all")
    if rule == "linear":
        return float(workers)
    if rule == "sqrt":
        return math.sqrt(workers)
    if rule == "none":
        return 1.0
    raise HvdkitError(f"unknown scaling rule {rule!r}; choose one of {', '.join(RULES)}")


def warmup_factor(step: int, steps: int, start: float) -> float:
    """Return the factor on the learning rate in optimizer step ``step`` of a linear warm-up.

    The factor rises evenly from ``start`` in step 0 to 1 in step ``steps`` and stays there.
    ``start = 1 / workers`` begins a linearly scaled run at the single worker's rate.

    Args:
        step: Optimizer steps taken so far, from 0.
        steps: Length of the warm-up; 0 means none.
        start: The first factor, above 0 and at most 1.

    Raises:
        HvdkitError: If an argument is out of its range.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), "gradual warmup".
    """
    if step < 0 or steps < 0:
        raise HvdkitError(f"steps are counted from 0, got step {step} of {steps}")
    if not 0 < start <= 1:
        raise HvdkitError(f"a warm-up starts at a factor above 0 and at most 1, got {start}")
    if step >= steps:
        return 1.0
    return start + (1 - start) * step / steps
