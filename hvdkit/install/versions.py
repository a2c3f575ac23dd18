"""Version strings, compared without the ``packaging`` distribution (it may not be installed)."""

import re

__all__ = ["release"]


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, for example ``(2, 13, 0)`` for "2.13.0+cpu".

    Raises:
        ValueError: The text does not start with a number.
    """
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise ValueError(f"Not a version: {version!r}")
    return tuple(int(part) for part in match[1].split("."))
