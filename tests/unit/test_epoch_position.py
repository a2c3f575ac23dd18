"""Tests of the position in an epoch."""

import pytest

from hvdkit.epoch_position import EpochPosition
from hvdkit.errors import HvdkitError
from hvdkit.sharding import shard_positions


def test_every_sample_counts_once_however_the_workers_change():
    position, seen = EpochPosition(60), []
    for workers in (3, 3, 2, 5, 1, 4, 2):
        if position.epoch:
            break
        for rank in range(workers):
            mine = shard_positions(60, rank, workers, start=position.position)
            seen += list(mine)[:4]
        position.advance(min(4, position.left(workers)), workers)
    assert sorted(seen) == list(range(60))
    assert (position.epoch, position.position) == (1, 0)


@pytest.mark.parametrize(("drop_last", "epoch"), [(False, 0), (True, 1)])
def test_what_does_not_go_round_for_more_workers(drop_last, epoch):
    before = EpochPosition(10, seed=5, drop_last=drop_last)
    before.advance(4, workers=2)
    assert (before.epoch, before.position) == (0, 8)
    after = EpochPosition(10, drop_last=drop_last)
    after.load_state_dict(before.state_dict(), workers=3)
    assert (after.epoch, after.seed) == (epoch, 5)
    assert after.left(3) == (1 if epoch == 0 else 3)


def test_other_data_and_negative_numbers_are_errors():
    position = EpochPosition(10)
    with pytest.raises(HvdkitError, match="one in 10 samples, and here are 11"):
        EpochPosition(11).load_state_dict(position.state_dict(), workers=2)
    with pytest.raises(HvdkitError, match="-1 samples"):
        position.advance(-1, workers=2)
