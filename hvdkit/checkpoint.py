"""Checkpoints on disk that survive a crash at any moment: atomic, checksummed, rotated.

A checkpoint is a payload file and a manifest beside it. The payload is complete and on disk
before the manifest appears (by a rename, which is atomic), so a manifest that is there promises
a whole checkpoint, and its SHA-256 proves it. What the payload holds is the caller's business.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hvdkit.errors import CheckpointError

FORMAT = 1
_MANIFEST = re.compile(r"(\d{8,})-step-(\d+)\.json")
_PAYLOAD = re.compile(r"\d{8,}-step-\d+\.(ckpt|part)")

__all__ = ["Checkpoint", "CheckpointStore", "find_damage"]


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


class CheckpointStore:
    """A directory of checkpoints, written by one process at a time and read by any number.

    Args:
        directory: Made when it does not exist. Files of other names in it are left alone.
        keep: How many of the newest checkpoints to keep; None keeps all.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep must be at least 1, or None to keep all; got {keep}")
        self.directory = Path(directory)
        self.keep = keep

    def write(self, step: int, write_payload: Callable[[BinaryIO], None]) -> Path:
        """Write a checkpoint, then remove those beyond ``keep``.

        Either the whole checkpoint is on disk when this returns, or the store is as before.

        Args:
            step: Training steps done so far, at least 0.
            write_payload: Writes the payload to the binary file it is given.

        Returns:
            The path of the payload.

        Raises:
            CheckpointError: If the file system refuses (no space, no permission). What
                ``write_payload`` itself raises comes through unchanged.
        """
        if step < 0:
            raise CheckpointError(f"a checkpoint's step is at least 0, got {step}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            newest = max((saved.sequence for saved in self.checkpoints()), default=0)
            stem = f"{newest + 1:08d}-step-{step}"
            made = Checkpoint(newest + 1, step, self.directory / f"{stem}.json")
            part = self.directory / f"{stem}.part"
            try:
                with part.open("xb") as file:
                    write_payload(file)
                    file.flush()
                    os.fsync(file.fileno())
                manifest = _make_manifest(made, part)
                part.rename(made.path)
                with part.open("x", encoding="utf-8") as text:
                    json.dump(manifest, text, indent=2)
                    text.flush()
                    os.fsync(text.fileno())
                part.rename(made.manifest_path)
                _sync_directory(self.directory)
            except BaseException:
                part.unlink(missing_ok=True)
                if not made.manifest_path.exists():
                    made.path.unlink(missing_ok=True)
                raise
            self._rotate()
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {self.directory}: {error}"
            ) from error
        return made.path

    def checkpoints(self) -> list[Checkpoint]:
        """List the checkpoints in the store from the oldest to the newest, unverified.

        Raises:
            CheckpointError: If the directory is there but cannot be read: it is not empty.
        """
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            names = []
        except OSError as error:
            raise CheckpointError(
                f"cannot read the checkpoints in {self.directory}: {error}"
            ) from error
        found = []
        for name in names:
            match = _MANIFEST.fullmatch(name)
            if match:
                found.append(Checkpoint(int(match[1]), int(match[2]), self.directory / name))
        return sorted(found, key=lambda saved: saved.sequence)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None when the store is empty.

        Warns of each damaged one that it passes over.

        Raises:
            CheckpointError: If there are checkpoints and every one is damaged: a run that
                started afresh here would hide the loss.
        """
        saved = self.checkpoints()
        for checkpoint in reversed(saved):
            problem = find_damage(checkpoint)
            if problem is None:
                return checkpoint
            warnings.warn(f"passing over a damaged checkpoint: {problem}", stacklevel=2)
        if saved:
            raise CheckpointError(
                f"all {len(saved)} checkpoints in {self.directory} are damaged; remove them to "
                "start afresh"
            )
        return None

    def find(self, step: int) -> Checkpoint:
        """Return the newest checkpoint of a step, verified.

        Raises:
            CheckpointError: If there is none, or it is damaged.
        """
        saved = self.checkpoints()
        for checkpoint in reversed(saved):
            if checkpoint.step == step:
                problem = find_damage(checkpoint)
                if problem:
                    raise CheckpointError(f"the checkpoint of step {step} is damaged: {problem}")
                return checkpoint
        steps = ", ".join(str(checkpoint.step) for checkpoint in saved) or "none"
        raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; it has: {steps}")

    def _rotate(self) -> None:
        if self.keep is None:
            return
        for checkpoint in self.checkpoints()[: -self.keep]:
            # The manifest goes first: what it promises must be there as long as it is.
            checkpoint.manifest_path.unlink(missing_ok=True)
            checkpoint.path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove what a crash left: unfinished files, payloads without a manifest."""
        for path in self.directory.iterdir():
            if _PAYLOAD.fullmatch(path.name) and not path.with_suffix(".json").exists():
                path.unlink()


def find_damage(checkpoint: Checkpoint) -> str | None:
    """Say what is wrong with a checkpoint; None when manifest and payload are whole."""
    name = checkpoint.manifest_path.name
    try:
        manifest = json.loads(checkpoint.manifest_path.read_text(encoding="utf-8"))
        seal = manifest.pop("manifest_sha256")
        if seal != _seal(manifest):
            return f"{name} does not match its own checksum"
        if manifest["format"] != FORMAT:
            return f"{name} has format {manifest['format']}, this version reads {FORMAT}"
        if manifest["payload"] != checkpoint.path.name:
            return f"{name} belongs to {manifest['payload']}"
        size_bytes = checkpoint.path.stat().st_size
        if size_bytes != manifest["size_bytes"]:
            return f"{checkpoint.path.name} has {size_bytes} of {manifest['size_bytes']} bytes"
        if _hash_file(checkpoint.path) != manifest["sha256"]:
            return f"{checkpoint.path.name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{name}: {type(error).__name__}: {error}"
    return None


def _make_manifest(made: Checkpoint, payload: Path) -> dict[str, Any]:
    manifest = {
        "format": FORMAT,
        "sequence": made.sequence,
        "step": made.step,
        "payload": made.path.name,
        "size_bytes": payload.stat().st_size,
        "sha256": _hash_file(payload),
    }
    return manifest | {"manifest_sha256": _seal(manifest)}


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_directory(directory: Path) -> None:
    """Put the renames themselves on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
