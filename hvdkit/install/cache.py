"""The cache of built wheels: one folder a key, written atomically, checked when read."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["WheelCache", "cache_root"]

RECORD = "record.json"


def cache_root() -> Path:
    """Return $HVDKIT_CACHE_DIR, or hvdkit's folder under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("HVDKIT_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "hvdkit"


class WheelCache:
    """Wheels under ``root/wheels/KEY/``, each beside a record of its digest and its key."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"

    def find(self, key: str) -> Path | None:
        """Return the wheel of a key; None when there is none or it is damaged."""
        folder = self.wheels / key
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            wheel = folder / record["wheel"]
            if _sha256(wheel) != record["sha256"]:
                return None
            with zipfile.ZipFile(wheel) as archive:
                return wheel if archive.testzip() is None else None
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return None

    def store(self, key: str, wheel: Path, material: Mapping[str, object]) -> Path:
        """Copy a wheel into the cache, replacing what the key has; return its place there.

        A reader sees the old folder, none, or the whole new one.
        """
        self.wheels.mkdir(parents=True, exist_ok=True)
        folder = self.wheels / key
        fresh = self.wheels / f".{key}.{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        shutil.copy2(wheel, fresh / wheel.name)
        record = {
            "wheel": wheel.name,
            "sha256": _sha256(fresh / wheel.name),
            "material": dict(material),
        }
        (fresh / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(fresh, folder)
        return folder / wheel.name

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the key's lock, so that concurrent installs build a wheel once.

        Args:
            key: The cache key.
            on_wait: Called once when somebody else holds the lock, before waiting for it.
        """
        self.wheels.mkdir(parents=True, exist_ok=True)
        with (self.wheels / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
