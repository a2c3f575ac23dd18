"""Hyper-parameters as texts that can be compared over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["list_values"]


def list_values(label: str, value: Any) -> list[tuple[str, str]]:
    """List the numbers, truth values and texts in a value as (label, text).

    Equal numbers give equal texts, whatever their type. Functions and other objects are left
    out: nothing says whether two of them are the same.

    Args:
        label: Names the value; what is in a dict gets its key in front.
        value: A number, a text, None, an array or tensor, or a list or dict of such.
    """
    if isinstance(value, Mapping):
        return [
            pair
            for key in sorted(value, key=str)
            for pair in list_values(f"{key} of {label}", value[key])
        ]
    text = _format(value)
    return [] if text is None else [(label, text)]


def _format(value: Any) -> str | None:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        texts = [_format(item) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(float(value))
    return repr(value) if value is None or isinstance(value, bool | str | complex) else None
