"""Checks of shard: who gets which elements of arrays, files and tf.data pipelines."""

import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.errors import HvdkitError, RankDisagreementError
from tests.distributed.worker import run_checks


def take(dataset):
    return [int(element) for element in dataset.as_numpy_iterator()]


def interleave(mine):
    """The elements in the order of the epoch: first of rank 0, first of rank 1, ..."""
    shares = hvd.allgather_object(mine)
    assert len({len(share) for share in shares}) == 1, shares
    return [element for step in zip(*shares, strict=True) for element in step]


def sources(length):
    yield tf.range(length)
    yield tf.data.Dataset.range(length)


def check_every_element_once_and_as_many_on_all_ranks():
    for length in (2, 7, 8):
        for drop_last in (False, True):
            for shuffle in (False, True):
                for source in sources(length):
                    shares = hvd.shard(source, shuffle, seed=3, drop_last=drop_last)
                    mine = take(shares)
                    assert int(shares.cardinality()) == len(mine)
                    order = interleave(mine)
                    left = length % hvd.size() if drop_last else 0
                    assert len(set(order[:length])) == length - left
                    assert order[length:] == order[: max(0, len(order) - length)]
                    assert shuffle or order[:length] == list(range(length - left))


def check_epochs_reshuffle_and_come_back():
    for source in sources(40):
        shares = hvd.shard(source, seed=1)
        orders = [interleave(take(shares)) for _ in range(3)]
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert all(sorted(order) == list(range(40)) for order in orders)
        for epoch in (1, 0):
            shares.set_epoch(epoch)
            assert interleave(take(shares)) == orders[epoch]
        assert interleave(take(shares)) == orders[1]
        assert interleave(take(hvd.shard(source, seed=2))) != orders[0]
        repeated = interleave(take(hvd.shard(source, seed=1).repeat(2)))
        assert repeated == orders[0] + orders[1]


def check_another_global_seed_on_each_rank_changes_nothing():
    orders = []
    for add in (0, 10):
        tf.random.set_seed(hvd.rank() + add)
        orders.append([interleave(take(hvd.shard(source))) for source in sources(30)])
    assert all(sorted(order) == list(range(30)) for order in orders[0])
    assert orders[0] == orders[1]


def check_batches_of_nested_arrays_are_as_long_on_every_rank():
    x = np.arange(22, dtype=np.float32).reshape(11, 2)
    shares = hvd.shard({"x": x, "y": np.arange(11)}, shuffle=False)
    batches = list(shares.batch(4).as_numpy_iterator())
    assert [len(batch["y"]) for batch in batches] == [4, 2]
    for step, batch in enumerate(batches):
        start = step * 4 * hvd.size() + hvd.rank()
        expected = [i % 11 for i in range(start, min(start + 4 * hvd.size(), 12), hvd.size())]
        assert batch["y"].tolist() == expected
        np.testing.assert_array_equal(batch["x"], x[batch["y"]])


def check_files_are_shared_out():
    names = [f"part-{i}" for i in range(5)]
    shares = hvd.shard(names, seed=4)
    mine = [name.decode() for name in shares.as_numpy_iterator()]
    order = interleave(mine)
    assert sorted(order[:5]) == names
    assert order[5:] == order[:1]


def check_data_that_cannot_be_shared_is_an_error_on_every_rank():
    with pytest.raises(HvdkitError, match="1 samples, fewer than the 2 workers"):
        hvd.shard(tf.range(1))
    with pytest.raises(HvdkitError, match="length is infinite"):
        hvd.shard(tf.data.Dataset.range(3).repeat())
    with pytest.raises(HvdkitError, match="length is not known"):
        hvd.shard(tf.data.Dataset.range(3).filter(lambda x: x > 0))
    with pytest.raises(HvdkitError, match="one length"):
        hvd.shard((np.zeros(3), np.zeros(4)))
    with pytest.raises(RankDisagreementError, match=r"length.*5.*6"):
        hvd.shard(tf.range(5 + hvd.rank()))
    with pytest.raises(RankDisagreementError, match="seed"):
        hvd.shard(tf.range(5), seed=hvd.rank())
    with pytest.raises(RankDisagreementError, match="part-1"):
        hvd.shard(["part-0", f"part-{1 + hvd.rank()}"])
    numbers = tf.data.Dataset.range(4)
    if hvd.rank() == 1:
        numbers = numbers.filter(lambda x: x > 0)
    with pytest.raises(HvdkitError, match="length is not known"):
        hvd.shard(numbers)


if __name__ == "__main__":
    run_checks(globals())
