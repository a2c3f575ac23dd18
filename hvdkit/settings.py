"""What was measured to suit this machine: a file that benchmarks write and adapters read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdkit.errors import HvdkitError

__all__ = ["Settings", "find_path", "pick_bucket_bytes", "read_settings", "write_settings"]

BUCKET_SIZE_MB = 8.0


@dataclass(frozen=True)
class Settings:
    """None where nothing was measured.

    Attributes:
        bucket_size_mb: Of gradients that travel together, in MiB.
        cycle_time_ms: How long Horovod waits for more operations.
    """

    bucket_size_mb: float | None = None
    cycle_time_ms: float | None = None


def find_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the file is: ``HVDKIT_SETTINGS``, or in the user's configuration folder."""
    named = environ.get("HVDKIT_SETTINGS")
    if named:
        return Path(named)
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home(), ".config")
    return Path(base) / "hvdkit" / "settings.json"


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return what the file says; nothing where there is none.

    Raises:
        HvdkitError: The file is damaged, or holds something else.
    """
    path = find_path(environ)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except (OSError, ValueError) as error:
        raise HvdkitError(f"cannot read {path}: {error}; {_REMEDY}") from None
    known = asdict(Settings())
    if not isinstance(found, dict) or set(found) - set(known):
        raise HvdkitError(f"{path} must hold {' and '.join(known)} alone; {_REMEDY}")
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < float("inf")):
            raise HvdkitError(f"{path}: {name} must be a number above 0, not {value!r}; {_REMEDY}")
    return Settings(**found)


def write_settings(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """Write the file whole or not at all; return its path.

    Raises:
        HvdkitError: It cannot be written.
    """
    path = find_path(environ)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(settings), indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise HvdkitError(f"cannot write {path}: {error.strerror}") from None
    return path


def pick_bucket_bytes(bucket_size_mb: float | None) -> int:
    """Return the size of a bucket: what was asked for, else what was measured, else 8 MiB."""
    if bucket_size_mb is None:
        bucket_size_mb = read_settings().bucket_size_mb or BUCKET_SIZE_MB
    return int(bucket_size_mb * (1 << 20))


_REMEDY = "remove it, or write it anew with: hvdkit bench allreduce --write-config"
