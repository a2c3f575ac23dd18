"""A checkpoint is there whole or not at all, whatever happened while it was written."""

import os
import random
import subprocess
import sys
import threading
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


def visible(directory):
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


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
    assert len(visible(tmp_path)) == 2 * 2 + 1
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
    assert len(visible(tmp_path)) == 4


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


@pytest.mark.parametrize(
    ("options", "match"),
    [({"keep_best": -1}, "keep_best must be at least 0"), ({"best_mode": "least"}, "'least'")],
)
def test_bad_options_are_refused(tmp_path, options, match):
    with pytest.raises(CheckpointError, match=match):
        CheckpointStore(tmp_path, **options)


@pytest.mark.parametrize(
    ("mode", "best", "kept"), [("min", 3, [2, 3, 5, 6]), ("max", 1, [1, 4, 5, 6])]
)
def test_the_best_stay_beside_the_newest(tmp_path, mode, best, kept):
    store = CheckpointStore(tmp_path, keep=2, keep_best=2, best_mode=mode)
    for step, score in enumerate([0.9, 0.3, 0.1, 0.5, 0.4, None], 1):
        store.write(step, lambda file: file.write(b"x"), score)
    assert steps(store) == kept
    assert store.best().step == best
    assert store.latest().step == 6
    again = CheckpointStore(tmp_path, best_mode=mode)
    assert again.choose(best=True).step == best
    with pytest.raises(CheckpointError, match="not for both"):
        again.choose(step=best, best=True)


def test_scores_that_compare_with_nothing_are_never_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=1)
    for step, score in enumerate([2.0, float("nan"), float("-inf"), None, 3.0, None]):
        store.write(step, lambda file: file.write(b"x"), score)
    assert steps(store) == [0, 5]
    assert store.best().step == 0


def test_of_equal_scores_the_oldest_is_the_best_and_stays(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=1)
    for step in range(4):
        store.write(step, lambda file: file.write(b"x"), 0.5)
    assert steps(store) == [0, 3]
    assert store.best().step == 0


def test_a_damaged_best_falls_back_to_the_next_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=None)
    assert store.best() is None
    for step, score in enumerate([3.0, 1.0, 2.0]):
        path = store.write(step, lambda file: file.write(b"x"), score)
        if step == 1:
            damaged = path
    damage(damaged, "flipped")
    with pytest.warns(UserWarning, match="damaged checkpoint: 00000002-step-1"):
        assert store.best().step == 2


def test_another_frameworks_checkpoint_is_an_error_that_names_it(tmp_path):
    class Theirs(CheckpointStore):
        framework = "keras"

    class Ours(CheckpointStore):
        framework = "torch"

    save(Theirs(tmp_path), 1)
    assert Theirs(tmp_path).choose().step == 1
    for options in ({}, {"step": 1}):
        with pytest.raises(CheckpointError, match=r"saved by hvdkit\.keras.*uses hvdkit\.torch"):
            Ours(tmp_path).choose(**options)


def test_what_is_written_beside_training_is_there_after_waiting(tmp_path):
    go = threading.Event()
    store = CheckpointStore(tmp_path, keep=1, asynchronous=True)

    def write(file):
        assert go.wait(30)
        file.write(b"first")

    path = store.write(1, write)
    assert not path.exists()  # the call came back before the file was there
    go.set()
    assert steps(store) == [1]
    assert path.read_bytes() == b"first"
    save(store, 2)
    store.wait()
    assert steps(store) == [2]
    assert visible(tmp_path) == ["00000002-step-2.ckpt", "00000002-step-2.json"]


def test_reading_waits_for_what_is_being_written(tmp_path):
    store = CheckpointStore(tmp_path, asynchronous=True)
    for step in range(3):
        save(store, step)
        assert store.latest().step == step


@pytest.mark.parametrize("surfaces", ["write", "wait", "close", "with"])
def test_an_error_beside_training_surfaces_once_and_is_logged_at_once(tmp_path, surfaces, caplog):
    def write(file):
        raise CheckpointError("no such luck")

    store = CheckpointStore(tmp_path, asynchronous=True)
    save(store, 1)
    store.write(2, write)
    assert store.latest().step == 1
    assert [record.message for record in caplog.records] == ["no such luck"]
    surface = {
        "write": lambda: save(store, 3),
        "wait": store.wait,
        "close": store.close,
        "with": lambda: store.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointError, match="no such luck"):
        surface[surfaces]()
    store.wait()
    save(store, 4)
    assert store.latest().step == 4


def test_an_error_of_the_block_goes_before_one_of_writing(tmp_path, caplog):
    def write(file):
        raise CheckpointError("of writing")

    def train():
        with CheckpointStore(tmp_path, asynchronous=True) as store:
            store.write(1, write)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        train()
    assert [record.message for record in caplog.records] == ["of writing"]


AT_EXIT = """
import sys, time
from hvdkit.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], asynchronous=True)
def write(file):
    time.sleep(0.3)
    file.write(b"last")
    if sys.argv[2] == "fails":
        raise OSError(28, "No space left on device")
store.write(7, write)
"""


@pytest.mark.parametrize("ends", ["well", "fails"])
def test_exit_waits_for_what_is_being_written_and_shows_its_error(tmp_path, ends):
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(tmp_path), ends],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if ends == "well":
        assert CheckpointStore(tmp_path).find(7).path.read_bytes() == b"last", done.stderr
    else:
        assert "cannot write the checkpoint of step 7" in done.stderr
        assert "free some space" in done.stderr
        assert visible(tmp_path) == []


WRITER = """
import itertools, sys
from hvdkit.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2, keep_best=1, asynchronous=sys.argv[3] == "beside")
first = int(sys.argv[2])
for step in itertools.count(first):
    def write(file, step=step):
        for _ in range(20):
            file.write(bytes([step % 256]) * 5000)
    store.write(step, write, score=-step)
    store.wait()
    print(step, flush=True)
"""


def test_kill_at_any_moment_loses_at_most_the_unfinished_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    chance = random.Random(0)
    last = 0
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for kill in range(20):
        how = ["in front", "beside"][kill % 2]
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(last + 1), how],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        reported = int(writer.stdout.readline())
        time.sleep(chance.uniform(0, 0.03))
        writer.kill()
        rest, _ = writer.communicate()
        reported = max([reported, *map(int, rest.split())])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            latest = store.latest()
        assert latest.step in (reported, reported + 1)
        assert latest.path.read_bytes() == bytes([latest.step % 256]) * 100_000
        assert store.best().step == latest.step
        last = latest.step


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stores_and_threads_of_one_process_do_not_disturb_each_other(tmp_path, asynchronous):
    """A store that begins takes what another is writing for no leftover, and no number twice."""
    stores = [CheckpointStore(tmp_path, keep=None, asynchronous=asynchronous) for _ in range(2)]
    begun, go_on = threading.Event(), threading.Event()

    def write(file):
        file.write(payload(0))
        file.flush()
        begun.set()
        assert go_on.wait(20)

    errors = []

    def many(first):
        try:
            for step in range(first, first + 8):
                save(stores[step % 2], step)
        except Exception as error:
            errors.append(error)

    slow = CheckpointStore(tmp_path, keep=None)
    threads = [threading.Thread(target=slow.write, args=(0, write))]
    threads[0].start()
    assert begun.wait(20)
    threads += [threading.Thread(target=many, args=(first,)) for first in (100, 200, 300)]
    for thread in threads[1:]:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    go_on.set()
    threads[0].join()
    for store in stores:
        store.close()
    assert errors == []
    found = slow.checkpoints()
    assert len({checkpoint.sequence for checkpoint in found}) == len(found)
    expected = [0, *(first + n for first in (100, 200, 300) for n in range(8))]
    assert sorted(checkpoint.step for checkpoint in found) == expected
    for checkpoint in found:
        assert slow.find(checkpoint.step).path.read_bytes() == payload(checkpoint.step)
