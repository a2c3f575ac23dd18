"""Checkpoints on disk that survive a crash at any moment: atomic, checksummed, rotated.

A checkpoint is a payload file and a manifest beside it. The payload is complete and on disk
before the manifest appears (by a rename, which is atomic), so a manifest that is there promises
a whole checkpoint, and its SHA-256 proves it. What the payload holds is the caller's business.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hvdkit.background import BackgroundWork
from hvdkit.directory_lock import DirectoryLock, lock_directory
from hvdkit.errors import CheckpointError
from hvdkit.manifest import (
    Checkpoint,
    find_damage,
    format_manifest,
    make_manifest,
    read_manifest,
)

_MANIFEST = re.compile(r"(\d{8,})-step-(\d+)\.json")
_PAYLOAD = re.compile(r"(\d{8,})-step-\d+\.(?:ckpt|part)")
_ADVICE = {
    errno.ENOSPC: "free some space or keep fewer",
    errno.EDQUOT: "free some space or keep fewer",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EACCES: "choose a directory that this user may write to",
    errno.EPERM: "choose a directory that this user may write to",
    errno.EROFS: "choose a directory that can be written to",
    errno.ENOTDIR: "choose a directory, not a file",
    errno.EEXIST: "choose a directory, not a file",
}

__all__ = ["CheckpointStore"]


class CheckpointStore:
    """A directory of checkpoints, written by one process at a time and read by any number.

    The first write locks the directory for this process, until it ends or ``close`` is called.

    ``with CheckpointStore(...) as store:`` waits at the end for what is being written.

    Args:
        directory: Made when it does not exist. Files of other names in it are left alone.
        keep: How many of the newest checkpoints to keep; None keeps all.
        keep_best: How many of those with the best scores to keep beside them.
        best_mode: Whether the best score is the least (``"min"``) or the greatest (``"max"``).
        asynchronous: Write in a thread, one checkpoint at a time: a second one waits for the
            first. An error is logged when it happens and raised by the next write, ``wait`` or
            ``close``. The interpreter waits for the thread before it exits.
    """

    framework: str | None = None
    """Goes into the manifest; only a store of the same framework loads the payload."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        keep_best: int = 0,
        best_mode: str = "min",
        asynchronous: bool = False,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep must be at least 1, or None to keep all; got {keep}")
        if keep_best < 0:
            raise CheckpointError(f"keep_best must be at least 0, got {keep_best}")
        if best_mode not in ("min", "max"):
            raise CheckpointError(f"best_mode must be 'min' or 'max', got {best_mode!r}")
        self.directory = Path(directory)
        self.keep = keep
        self.keep_best = keep_best
        self.best_mode = best_mode
        self.asynchronous = asynchronous
        self._work = BackgroundWork()
        self._lock: DirectoryLock | None = None

    def __enter__(self) -> CheckpointStore:
        """Return the store."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the store; an error of the ``with`` block goes before one of writing."""
        if kind is None:
            self.close()
        else:
            self._work.settle()
            self._lock = None

    def write(
        self, step: int, write_payload: Callable[[BinaryIO], None], score: float | None = None
    ) -> Path:
        """Write a checkpoint, then remove those beyond ``keep`` and ``keep_best``.

        Either the whole checkpoint is on disk when this returns, or the store is as before. If
        the store is asynchronous, that holds when ``wait`` returns.

        Args:
            step: Training steps done so far, at least 0.
            write_payload: Writes the payload to the binary file it is given; in the store's
                thread if that is asynchronous.
            score: What ``best`` goes by; NaN, infinities and None: never the best.

        Returns:
            The path of the payload.

        Raises:
            CheckpointError: If another process writes here, or the file system refuses (no
                space, no permission). What ``write_payload`` itself raises comes through
                unchanged. In an asynchronous store, errors of the checkpoint before.
        """
        step = operator.index(step)
        if step < 0:
            raise CheckpointError(f"a checkpoint's step is at least 0, got {step}")
        score = None if score is None else float(score)
        if score is not None and not math.isfinite(score):
            score = None
        self.wait()
        with self._explain(step):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock = lock_directory(self.directory)
            self._remove_leftovers(lock)
            newest = max((saved.sequence for saved in self.checkpoints()), default=0)
            number = lock.take_number(newest)
            made = Checkpoint(number, step, self.directory / f"{number:08d}-step-{step}.json")

        def work() -> None:
            try:
                self._write(made, write_payload, score)
            finally:
                lock.under_way.discard(number)

        if self.asynchronous:
            self._work.start(work)
        else:
            work()
        return made.path

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: The last checkpoint could not be written; raised once.
        """
        self._work.wait()

    def close(self) -> None:
        """Wait as ``wait`` does, and let another process write here; a later write locks anew."""
        try:
            self.wait()
        finally:
            self._lock = None

    def checkpoints(self) -> list[Checkpoint]:
        """List the checkpoints in the store from the oldest to the newest, unverified.

        Waits for the one that this store is writing.

        Raises:
            CheckpointError: If the directory is there but cannot be read: it is not empty.
        """
        self._work.settle()
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
        return self._find_whole(list(reversed(self.checkpoints())))

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best score that is whole; of equals the oldest.

        Warns of each damaged one that it passes over.

        Returns:
            None when no checkpoint has a score.

        Raises:
            CheckpointError: If every one that has a score is damaged.
        """
        return self._find_whole(self._rank(self.checkpoints()))

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

    def choose(self, step: int | None = None, best: bool = False) -> Checkpoint | None:
        """Return the checkpoint that ``load`` is to load: the newest, that of a step, or the best.

        Raises:
            CheckpointError: As ``latest``, ``find`` and ``best``; if both are asked for, or
                another framework wrote it.
        """
        if best and step is not None:
            raise CheckpointError("ask for a step or for the best checkpoint, not for both")
        found = self.best() if best else self.latest() if step is None else self.find(step)
        if found is not None:
            wrote = read_manifest(found).get("framework") or self.framework
            if wrote != self.framework:
                raise CheckpointError(
                    f"{found.path} was saved by hvdkit.{wrote}, and only its CheckpointStore "
                    f"loads it; give this run, which uses hvdkit.{self.framework}, another "
                    "directory"
                )
        return found

    def _find_whole(self, candidates: list[Checkpoint]) -> Checkpoint | None:
        for checkpoint in candidates:
            problem = find_damage(checkpoint)
            if problem is None:
                return checkpoint
            warnings.warn(f"passing over a damaged checkpoint: {problem}", stacklevel=3)
        if candidates:
            raise CheckpointError(
                f"all {len(candidates)} checkpoints in {self.directory} are damaged; remove them "
                "to start afresh"
            )
        return None

    def _rank(self, saved: list[Checkpoint]) -> list[Checkpoint]:
        """Return those with a score, the best first, of equals the oldest."""
        sign = 1 if self.best_mode == "min" else -1
        scored = []
        for checkpoint in saved:
            try:
                score = read_manifest(checkpoint).get("score")
            except (OSError, ValueError):
                continue
            if score is not None:
                scored.append((sign * score, checkpoint.sequence, checkpoint))
        return [checkpoint for _, _, checkpoint in sorted(scored, key=lambda entry: entry[:2])]

    def _write(
        self, made: Checkpoint, write_payload: Callable[[BinaryIO], None], score: float | None
    ) -> None:
        part = made.path.with_suffix(".part")
        with self._explain(made.step):
            try:
                with part.open("xb") as file:
                    write_payload(file)
                    file.flush()
                    os.fsync(file.fileno())
                manifest = make_manifest(made, part, framework=self.framework, score=score)
                part.rename(made.path)
                with part.open("x", encoding="utf-8") as text:
                    text.write(format_manifest(manifest))
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

    @contextmanager
    def _explain(self, step: int) -> Iterator[None]:
        """Turn an error of the file system into one that says what to do."""
        try:
            yield
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0)
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {self.directory}: {error}; those "
                f"before it are as they were{f'. Please {advice}' if advice else ''}"
            ) from error

    def _rotate(self) -> None:
        if self.keep is None:
            return
        saved = self.checkpoints()
        older = saved[: -self.keep]
        best = self._rank(saved)[: self.keep_best] if older and self.keep_best else []
        for checkpoint in older:
            if checkpoint not in best:
                # The manifest goes first: what it promises must be there as long as it is.
                checkpoint.manifest_path.unlink(missing_ok=True)
                checkpoint.path.unlink(missing_ok=True)

    def _remove_leftovers(self, lock: DirectoryLock) -> None:
        """Remove what a crash left: unfinished files, payloads without a manifest.

        Not what another thread, or another store in this process, is writing.
        """
        for path in self.directory.iterdir():
            match = _PAYLOAD.fullmatch(path.name)
            if match is None or int(match[1]) in lock.under_way:
                continue
            # Looked for last: what was under way until now has its manifest.
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Put the renames themselves on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
