"""How numbers are written in a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["join", "show", "show_interval", "show_ms", "show_share", "show_size"]


def show(number: float | None) -> str:
    """Write a number with four significant digits; nothing for None."""
    if number is None:
        return ""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e15 else f"{number:.4g}"


def show_ms(time_s: float | None) -> str:
    """Write seconds as milliseconds, without the unit."""
    return "" if time_s is None else show(1e3 * time_s)


def show_share(share: float | None) -> str:
    """Write a share in percent."""
    return "" if share is None else f"{share:.1%}"


def show_size(size_bytes: float) -> str:
    """Write a size with the largest unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} GiB"


def show_interval(found: Mapping[str, Any]) -> str:
    """Write an estimate with the bounds of its interval: ``estimate``, ``low`` and ``high``."""
    return f"{found['estimate']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def join(*names: Any) -> str:
    """Write what names a line or a row, without those that are empty."""
    return ", ".join(str(name) for name in names if name not in (None, ""))
