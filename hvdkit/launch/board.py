"""A file in the cache folder of the home, which clusters share between hosts."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FileBoard"]


class FileBoard:
    """Where rank 0 of a job leaves word for the others; only its owner can read it."""

    def __init__(self, name: str) -> None:
        """Name it.

        Args:
            name: No other job may have it.
        """
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(cache) / "hvdkit" / "jobs" / name

    def write(self, text: str) -> None:
        """Leave word."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        part.touch(mode=0o600)
        part.write_text(text, encoding="ascii")
        part.replace(self.path)

    def read(self) -> str | None:
        """Return it, or None as long as there is none."""
        try:
            return self.path.read_text(encoding="ascii")
        except FileNotFoundError:
            return None

    def clear(self) -> None:
        """Take it away."""
        self.path.unlink(missing_ok=True)
