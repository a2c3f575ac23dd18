"""A checkpoint is there whole or not at all, whatever happened while it was written."""

import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from hvdkit.checkpoint import CheckpointStore
from hvdkit.errors import CheckpointError, HvdkitError

ROOT = Path(__file__).resolve().parents[2]


def payload(step):
    return f"weights after step {step}".encode() * 50


def save(store, step):
    return store.write(step, lambda file: file.write(payload(step)))


def steps(store):
    return [checkpoint.step for checkpoint in store.checkpoints()]


def damage(path, how):
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def test_what_was_written_is_found(tmp_path):
    store = CheckpointStore(tmp_path / "runs" / "a")
    assert store.latest() is None
    path = save(store, 7)
    latest = store.latest()
    assert (latest.step, latest.path) == (7, path)
    assert path.read_bytes() == payload(7)
    assert store.find(7).path == path


def test_the_newest_are_kept_and_nothing_else_is_touched(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "notes.json").write_text("mine")
    for step in range(5):
        save(store, step)
    assert steps(store) == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2 * 2 + 1
    everything = CheckpointStore(tmp_path, keep=None)
    for step in range(5, 9):
        save(everything, step)
    assert steps(everything) == list(range(3, 9))


def test_newest_means_last_written_not_highest_step(tmp_path):
    """A run that went back to step 10 and saved step 11 goes on from 11, not from the old 20."""
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 11):
        save(store, step)
    assert store.latest().step == 11
    assert steps(store) == [20, 11]


def test_a_step_saved_twice_yields_its_second_payload(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 4)
    store.write(4, lambda file: file.write(b"again"))
    assert store.find(4).path.read_bytes() == b"again"
    assert store.latest().path.read_bytes() == b"again"


@pytest.mark.parametrize("suffix", [".ckpt", ".json"])
@pytest.mark.parametrize("how", ["empty", "truncated", "flipped"])
def test_a_damaged_newest_falls_back_with_a_warning(tmp_path, suffix, how):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    damage(store.checkpoints()[-1].path.with_suffix(suffix), how)
    with pytest.warns(UserWarning, match="damaged checkpoint: 00000002-step-2"):
        assert store.latest().step == 1
    with pytest.raises(CheckpointError, match="step 2 is damaged"):
        store.find(2)


def test_a_missing_payload_falls_back_and_a_missing_manifest_was_never_saved(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    third, second = store.checkpoints()[:0:-1]
    damage(third.manifest_path, "missing")
    damage(second.path, "missing")
    with pytest.warns(UserWarning, match="No such file"):
        assert store.latest().step == 1


def test_a_manifest_of_another_checkpoint_is_damage(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    first, second = store.checkpoints()
    second.path.write_bytes(first.path.read_bytes())
    second.manifest_path.write_bytes(first.manifest_path.read_bytes())
    with pytest.warns(UserWarning, match="belongs to"):
        assert store.latest().step == 1


def test_nothing_usable_is_an_error_not_a_fresh_start(tmp_path):
    store = CheckpointStore(tmp_path)
    damage(save(store, 1), "flipped")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(CheckpointError, match="all 1 checkpoints"),
    ):
        store.latest()


def test_a_failing_writer_leaves_the_store_as_it_was(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def write(file):
        file.write(b"half of it")
        raise KeyError("the writer's own")

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyError, match="own"):
        store.write(2, write)
    assert sorted(tmp_path.iterdir()) == before
    assert store.latest().step == 1


def test_a_file_system_that_refuses_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    store = CheckpointStore(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"step 3 to .*file"):
        save(store, 3)
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoints in .*file"):
        store.latest()  # what cannot be read is not empty


def test_leftovers_of_a_crash_are_removed_by_the_next_save(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "00000002-step-9.part").write_bytes(b"unfinished")
    (tmp_path / "00000002-step-9.ckpt").write_bytes(b"no manifest yet")
    assert store.latest().step == 1
    save(store, 2)
    assert steps(store) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 4


def test_asking_for_a_step_that_is_not_there_lists_those_that_are(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="has: none"):
        store.find(5)
    for step in (1, 2):
        save(store, step)
    with pytest.raises(CheckpointError, match="has: 1, 2"):
        store.find(5)


@pytest.mark.parametrize("keep", [0, -1])
def test_bad_arguments_are_refused(tmp_path, keep):
    with pytest.raises(HvdkitError, match="keep"):
        CheckpointStore(tmp_path, keep=keep)
    with pytest.raises(CheckpointError, match="at least 0"):
        save(CheckpointStore(tmp_path), -1)


WRITER = """
import itertools, sys
from hvdkit.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
first = int(sys.argv[2])
for step in itertools.count(first):
    def write(file):
        for _ in range(20):
            file.write(bytes([step % 256]) * 5000)
    store.write(step, write)
    print(step, flush=True)
"""


def test_kill_at_any_moment_loses_at_most_the_unfinished_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    chance = random.Random(0)
    last = 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(last + 1)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        reported = int(writer.stdout.readline())
        time.sleep(chance.uniform(0, 0.05))
        writer.kill()
        rest, _ = writer.communicate()
        reported = max([reported, *map(int, rest.split())])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            latest = store.latest()
        assert latest.step in (reported, reported + 1)
        assert latest.path.read_bytes() == bytes([latest.step % 256]) * 100_000
        last = latest.step
