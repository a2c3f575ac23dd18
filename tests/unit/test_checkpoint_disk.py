"""A disk that is full or refuses: what is there stays, and the error says what to do."""

import contextlib
import os
import resource
import subprocess
from pathlib import Path

import pytest

from hvdkit.checkpoint import CheckpointStore
from hvdkit.errors import CheckpointError

PAYLOAD_BYTES = 200_000


class TinyDisk:
    """A tmpfs of 1 MiB that is filled by a file."""

    def __init__(self, directory):
        self.directory = directory
        self._filler = directory / "filler"

    def fill(self):
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)

    def free(self):
        self._filler.unlink()


class FileLimit:
    """Where nothing can be mounted: this process may write no file of that size."""

    def __init__(self, directory):
        self.directory = directory
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAYLOAD_BYTES // 2, self._limits[1]))

    def free(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@pytest.fixture
def disk(tmp_path):
    """A disk that can be filled: a tmpfs of its own where this user may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    disk = (TinyDisk if mounted else FileLimit)(tmp_path)
    try:
        yield disk
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
        else:
            disk.free()


def write(store, step):
    store.write(step, lambda file: file.write(bytes([step]) * PAYLOAD_BYTES))
    store.wait()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in front", "beside"])
def test_a_full_disk_leaves_the_old_ones_and_works_again_with_space(disk, asynchronous):
    store = CheckpointStore(disk.directory, keep=2, asynchronous=asynchronous)
    for step in (1, 2):
        write(store, step)
    disk.fill()
    before = {path.name: path.stat().st_size for path in disk.directory.iterdir()}
    for step in (3, 4):
        with pytest.raises(CheckpointError, match=rf"step {step} to .*Please (free|raise)"):
            write(store, step)
        assert {path.name: path.stat().st_size for path in disk.directory.iterdir()} == before
        assert store.latest().path.read_bytes() == b"\2" * PAYLOAD_BYTES
        assert store.find(1).path.read_bytes() == b"\1" * PAYLOAD_BYTES
    disk.free()
    write(store, 5)
    assert [saved.step for saved in store.checkpoints()] == [2, 5]
    assert store.latest().path.read_bytes() == b"\5" * PAYLOAD_BYTES


@contextlib.contextmanager
def without_privileges():
    """Let permissions count for root too."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in front", "beside"])
def test_a_directory_that_refuses_is_an_error_of_the_first_write(tmp_path, asynchronous):
    tmp_path.chmod(0o500)
    store = CheckpointStore(tmp_path / "runs", asynchronous=asynchronous)
    with without_privileges(), pytest.raises(CheckpointError, match="this user may write to"):
        store.write(1, lambda file: None)
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file", asynchronous=asynchronous)
    with pytest.raises(CheckpointError, match="a directory, not a file"):
        store.write(1, lambda file: None)
    assert Path(tmp_path / "file").is_file()
