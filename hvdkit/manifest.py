"""The manifest of a checkpoint: which payload it promises, and how to prove that it is whole.

One small JSON file beside the payload, the same for every framework. Its own checksum covers all
its entries, the payload's SHA-256 among them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit import __version__

__all__ = [
    "FORMAT",
    "Checkpoint",
    "find_damage",
    "format_manifest",
    "make_manifest",
    "read_manifest",
]

# 1: hvdkit 0.1, without framework, hvdkit_version and score.
FORMAT = 2
_READABLE = (1, FORMAT)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint whose manifest is in the store."""

    sequence: int  # counts the saves of this directory; the newest is the highest
    step: int
    manifest_path: Path

    @property
    def path(self) -> Path:
        """The payload file."""
        return self.manifest_path.with_suffix(".ckpt")


def make_manifest(
    made: Checkpoint, payload: Path, *, framework: str | None, score: float | None
) -> dict[str, Any]:
    """Describe a checkpoint whose payload is on disk.

    Args:
        made: The checkpoint.
        payload: Where its payload is by now.
        framework: The adapter that can load it, ``"torch"`` or ``"keras"``; None: the caller's.
        score: What it may be chosen by, finite; None: never.
    """
    manifest = {
        "format": FORMAT,
        "framework": framework,
        "hvdkit_version": __version__,
        "sequence": made.sequence,
        "step": made.step,
        "score": score,
        "payload": made.path.name,
        "size_bytes": payload.stat().st_size,
        "sha256": _hash_file(payload),
    }
    return manifest | {"manifest_sha256": _seal(manifest)}


def format_manifest(manifest: dict[str, Any]) -> str:
    """Return a manifest as the text of its file."""
    return json.dumps(manifest, indent=2)


def read_manifest(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read a manifest that is whole; the payload is not looked at.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged, of a later format, or of another checkpoint.
    """
    text = checkpoint.manifest_path.read_text(encoding="utf-8")
    manifest = json.loads(text)
    if not isinstance(manifest, dict):
        raise ValueError("it is no manifest")
    entries = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    # The text too: another spelling of the same number is damage as well.
    if manifest.get("manifest_sha256") != _seal(entries) or text != format_manifest(manifest):
        raise ValueError("it does not match its own checksum")
    if manifest.get("format") not in _READABLE:
        raise ValueError(
            f"it has format {manifest.get('format')}, this version of hvdkit reads "
            f"{' and '.join(map(str, _READABLE))}"
        )
    if manifest.get("payload") != checkpoint.path.name:
        raise ValueError(f"it belongs to {manifest.get('payload')}")
    return manifest


def find_damage(checkpoint: Checkpoint) -> str | None:
    """Say what is wrong with a checkpoint; None when manifest and payload are whole."""
    try:
        manifest = read_manifest(checkpoint)
        size_bytes = checkpoint.path.stat().st_size
        if size_bytes != manifest.get("size_bytes"):
            return f"{checkpoint.path.name} has {size_bytes} of {manifest.get('size_bytes')} bytes"
        if _hash_file(checkpoint.path) != manifest.get("sha256"):
            return f"{checkpoint.path.name} does not match its checksum"
    except (OSError, ValueError, RecursionError) as error:
        return f"{checkpoint.manifest_path.name}: {error}"
    return None


def _seal(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
