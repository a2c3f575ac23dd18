"""One process at a time writes into a directory.

The lock is POSIX's (``fcntl``): the kernel gives it up when its process ends, however it ends,
and a forked child (a data loader's worker) does not hold it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
import warnings
import weakref
from pathlib import Path

from hvdkit.errors import CheckpointError

__all__ = ["DirectoryLock", "lock_directory"]

NAME = ".hvdkit.lock"
# A job that was ended a moment ago may not be gone yet; rank 0 of an elastic job may move.
WAIT_S = 10.0

_HELD: weakref.WeakValueDictionary[Path, DirectoryLock] = weakref.WeakValueDictionary()
_MUTEX = threading.Lock()


class DirectoryLock:
    """A lock that this process holds until nobody refers to this object any more."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.under_way: set[int] = set()  # the numbers of files that are being written
        self._last = 0
        self._numbering = threading.RLock()  # a signal handler may want a number, too
        self._descriptor = descriptor
        self._pid = os.getpid()
        weakref.finalize(self, _close, descriptor, self._pid)

    def take_number(self, newest: int) -> int:
        """Return a number above ``newest`` and those taken before, and note it as under way."""
        with self._numbering:
            self._last = max(self._last, newest) + 1
            self.under_way.add(self._last)
            return self._last

    def is_valid(self) -> bool:
        """Whether this process still holds it, and on the file that is there now."""
        if self._pid != os.getpid():
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False


def lock_directory(directory: Path) -> DirectoryLock:
    """Lock a directory for this process, whose callers all get the same lock.

    Warns, and goes on, on a file system without locks.

    Args:
        directory: It must exist; a file ``.hvdkit.lock`` stays in it.

    Raises:
        CheckpointError: Another process holds it, also after ten seconds.
        OSError: The file cannot be made.
    """
    path = directory.resolve() / NAME
    with _MUTEX:
        lock = _HELD.get(path)
        if lock is None or not lock.is_valid():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _acquire(descriptor, directory)
            except BaseException:
                os.close(descriptor)
                raise
            lock = _HELD[path] = DirectoryLock(path, descriptor)
        return lock


def _acquire(descriptor: int, directory: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                warnings.warn(
                    f"the file system of {directory} has no locks ({error}): see to it that no "
                    "other job writes checkpoints there",
                    stacklevel=2,
                )
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() >= deadline_s:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "an unknown process"
            raise CheckpointError(
                f"another job writes checkpoints to {directory} ({owner}); give each job a "
                "directory of its own, or end the other one"
            )
        time.sleep(0.05)
    # For the message above; a full disk must not keep anybody from writing once there is space.
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
    except OSError:
        pass


def _close(descriptor: int, pid: int) -> None:
    # Closing any descriptor of the file would give up a lock that a forked child took itself.
    if os.getpid() == pid:
        os.close(descriptor)
