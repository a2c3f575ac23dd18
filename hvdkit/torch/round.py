"""The factors of one reduction of all gradients."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Round"]


@dataclass
class Round:
    """What one reduction divides by; the same for all buckets of an optimizer.

    Attributes:
        scale: Each local gradient is multiplied by it before the sum.
        postscale: The sum is multiplied by it.
        reopen: Turns a reduced gradient back into a local one: reducing it again with this
            factor in front gives the same value.
        reopens: Whether ``reopen`` can differ from one in this optimizer's rounds.
        mean: Whether the result is a mean over ranks (``scale`` has the division in it).
        active: Whether this rank takes part; if not, it contributes zeros.
        ranks: How many ranks take part.
        probes: Whether to note what tells if this rank's own gradients are finite.
    """

    scale: float = 1.0
    postscale: float = 1.0
    reopen: float = 1.0
    reopens: bool = False
    mean: bool = True
    active: bool = True
    ranks: int = 1
    probes: bool = False
