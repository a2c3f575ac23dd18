"""Every sample exactly once, the same number of steps for all, from any position on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import HvdkitError
from hvdkit.sharding import (
    check_shardable,
    count_samples,
    order_epoch,
    shard_indices,
    shard_positions,
)


@st.composite
def worlds(draw):
    workers = draw(st.integers(1, 9))
    return draw(st.integers(workers, 60)), workers


def visit(length, workers, **options):
    """Positions of all ranks in the order of a step: rank 0's first, rank 1's first, ..."""
    ranks = [shard_positions(length, rank, workers, **options) for rank in range(workers)]
    assert len({len(positions) for positions in ranks}) == 1
    return [position for step in zip(*ranks, strict=True) for position in step]


@given(worlds(), st.booleans(), st.integers(0, 70))
def test_positions_run_on_from_the_start_without_gap_or_repeat(world, drop_last, start):
    length, workers = world
    positions = visit(length, workers, start=start, drop_last=drop_last)
    assert positions == list(range(start, start + len(positions)))
    assert len(positions) == workers * count_samples(
        length, workers, start=start, drop_last=drop_last
    )
    if start >= length:
        assert positions == []
    elif drop_last:
        assert length - workers < start + len(positions) <= length
    else:
        assert length <= start + len(positions) < length + workers


@given(worlds(), st.integers(1, 9), st.integers(0, 9), st.integers(0, 3))
def test_a_run_resumes_at_another_world_size(world, later_workers, steps, seed):
    length, workers = world
    if length < later_workers:
        later_workers = length
    order = order_epoch(length, seed=seed, epoch=1)
    before = visit(length, workers)[: steps * workers]
    after = visit(length, later_workers, start=len(before))
    seen = shard_indices(order, range(len(before))) + [order[p % length] for p in after]
    assert seen[:length] == list(order)
    assert sorted(seen[:length]) == list(range(length))


def test_padding_wraps_round_to_the_first_samples():
    order = [4, 2, 0, 1, 3]
    shares = [shard_indices(order, shard_positions(5, rank, 3)) for rank in range(3)]
    assert shares == [[4, 1], [2, 3], [0, 4]]


def test_without_shuffling_the_order_is_the_datasets():
    assert list(order_epoch(6, seed=3, epoch=2, shuffle=False)) == list(range(6))


def test_the_order_depends_on_seed_and_epoch_alone():
    orders = {(s, e): order_epoch(50, seed=s, epoch=e) for s in range(3) for e in range(3)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == len(orders)
    assert all(order_epoch(50, seed=s, epoch=e) == order for (s, e), order in orders.items())


def test_shuffling_is_even():
    """Each sample comes first about as often as any other (600 draws of 6, five sigma)."""
    counts = [0] * 6
    for epoch in range(600):
        counts[order_epoch(6, seed=0, epoch=epoch)[0]] += 1
    sigma = (600 * 1 / 6 * 5 / 6) ** 0.5
    assert all(abs(count - 100) < 5 * sigma for count in counts)


@pytest.mark.parametrize("length", [0, 3])
def test_fewer_samples_than_workers_is_refused(length):
    with pytest.raises(HvdkitError, match=f"{length} samples.*4 workers"):
        check_shardable(length, 4)
    with pytest.raises(HvdkitError, match="fewer than"):
        shard_positions(length, 0, 4)


def test_bad_arguments_are_refused():
    with pytest.raises(HvdkitError, match="at least 1, got 0"):
        check_shardable(3, 0)
    with pytest.raises(HvdkitError, match="between 0 and 1, got 2"):
        shard_positions(8, 2, 2)
    with pytest.raises(HvdkitError, match="at least 0, got -1"):
        count_samples(8, 2, start=-1)
