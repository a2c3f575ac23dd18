"""What the settings of every benchmark demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdkit.errors import HvdkitError

__all__ = ["require_known", "require_positive", "require_workers"]


def require_known(kind: str, names: Sequence[str], known: Iterable[str]) -> None:
    """Raise HvdkitError unless there are names, distinct ones, and all of them known."""
    if not names or set(names) - set(known) or len(set(names)) < len(names):
        raise HvdkitError(
            f"{kind} must be distinct names from {', '.join(known)}; "
            f"got {', '.join(names) or 'none'}"
        )


def require_positive(settings: Any, *names: str) -> None:
    """Raise HvdkitError for an attribute that is below one."""
    for name in names:
        if getattr(settings, name) < 1:
            raise HvdkitError(f"{name} must be at least 1; got {getattr(settings, name)}")


def require_workers(workers: Sequence[int]) -> None:
    """Raise HvdkitError unless there are numbers of workers, distinct ones, and all above zero."""
    if not workers or min(workers) < 1 or len(set(workers)) < len(workers):
        raise HvdkitError("numbers of workers must be distinct, and at least 1")
