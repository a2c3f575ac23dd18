"""Runs that a kill or a new number of workers interrupts; test_resume.py launches the parts."""

import os
from pathlib import Path

import hvdkit.torch as hvd
from hvdkit.torch.collectives import allgather_object
from tests.distributed.resumed_training import EPOCHS, SAMPLES, note, recall, train
from tests.distributed.worker import run_checks

SCRATCH = Path(os.environ["HVDKIT_TEST_SCRATCH"])


def check_saving_changes_nothing():
    whole = train()
    note("whole", whole)
    assert len(whole[0]) == 11 * EPOCHS
    assert train(SCRATCH / "saving") == whole
    assert len({tuple(losses.values()) for losses, _, _ in gather(whole)}) == hvd.size()


def check_every_worker_is_killed():
    """The last: in the middle of step 15, which is in the middle of the second epoch."""
    train(SCRATCH / "run", kill_at=15)
    raise AssertionError("it was to be killed")


def check_a_killed_run_goes_on_to_the_last_bit():
    losses, indices, parameters = train(SCRATCH / "run")
    # After the checkpoint of step 12, or 8 if the kill came before that one was written.
    first = min(losses)
    assert first in (9, 13)
    expected = recall("whole", hvd.rank())
    assert {str(step): loss for step, loss in losses.items()} == {
        step: loss for step, loss in expected[0].items() if int(step) >= first
    }
    assert all(expected[1][str(step)] == chosen for step, chosen in indices.items())
    assert parameters == expected[2]


def check_a_run_stops_in_the_middle_of_an_epoch():
    note(f"stopped-{hvd.size()}", train(SCRATCH / "sizes", save_every=1, stop_at=7)[1])


def check_another_number_of_workers_finishes_the_epoch():
    """Two have made 7 steps, so 42 of 66 samples; three go on for 2 steps, to 60."""
    indices = train(SCRATCH / "sizes", save_every=1, stop_at=9)[1]
    note(f"stopped-{hvd.size()}", indices)
    assert sorted(indices) == [8, 9]


def check_one_worker_ends_the_epoch():
    """The 6 samples that are left; then epochs of its own."""
    indices = train(SCRATCH / "sizes", save_every=1)[1]
    seen = [recall("stopped-2", rank) for rank in range(2)]
    seen += [recall("stopped-3", rank) for rank in range(3)]
    seen += [{step: indices[step] for step in (10, 11)}]
    samples = [index for part in seen for chosen in part.values() for index in chosen]
    assert sorted(samples) == list(range(SAMPLES))  # once each, none left out
    second = [index for step in range(12, 12 + SAMPLES // 3) for index in indices[step]]
    assert sorted(second) == list(range(SAMPLES))


def gather(value):
    return allgather_object(value, name="tests")


if __name__ == "__main__":
    run_checks(globals())
