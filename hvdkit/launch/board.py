"""A file in the cache folder of the home, which clusters share between hosts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hvdkit.errors import HvdkitError

__all__ = ["FileBoard"]


class FileBoard:
    """Where rank 0 of a job leaves word for the others; only its owner can read it."""

    def __init__(self, name: str) -> None:
        """Name it.

        Args:
            name: No other job may have it.
        """
        # Not $XDG_CACHE_HOME: it may be a disk of this host, and mpirun does not pass it on.
        self.path = Path.home() / ".cache" / "hvdkit" / "jobs" / name

    def write(self, text: str) -> None:
        """Leave word.

        Raises:
            HvdkitError: The file cannot be written.
        """
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.touch(mode=0o600)
            part.write_text(text, encoding="ascii")
            part.replace(self.path)
        except OSError as error:
            raise HvdkitError(f"cannot leave word for the other ranks: {error}") from None

    def read(self) -> str | None:
        """Return it, or None as long as there is none.

        Raises:
            HvdkitError: The file cannot be read.
        """
        try:
            # NFS remembers for a while that a file was not there, a folder's list it asks anew.
            if self.path.name not in os.listdir(self.path.parent):
                return None
            return self.path.read_text(encoding="ascii")
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise HvdkitError(f"cannot read the word of rank 0: {error}") from None

    def clear(self) -> None:
        """Take it away."""
        self.path.unlink(missing_ok=True)
