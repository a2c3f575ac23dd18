"""The fusion plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.buckets import plan_buckets, split_evenly


def test_buckets_close_when_full_and_the_first_is_small():
    plan = plan_buckets([6, 6, 6, 6, 6], "aaaaa", bucket_bytes=12, first_bucket_bytes=4)
    assert plan == [[0], [1, 2], [3, 4]]


def test_a_tensor_larger_than_the_limit_is_not_split():
    assert plan_buckets([1, 100, 1], "aaa", bucket_bytes=10, first_bucket_bytes=10) == [[0, 1], [2]]


def test_keys_are_never_mixed_and_come_in_the_order_of_their_last_tensor():
    plan = plan_buckets([4, 4, 4, 4], "abab", bucket_bytes=100)
    assert plan == [[0, 2], [1, 3]]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abc"))),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_every_tensor_is_in_one_bucket_of_its_key(tensors, bucket_bytes, first_bucket_bytes):
    sizes = [size for size, _ in tensors]
    keys = [key for _, key in tensors]
    plan = plan_buckets(
        sizes, keys, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes
    )
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(tensors)))
    for bucket in plan:
        assert bucket == sorted(bucket)
        assert len({keys[index] for index in bucket}) == 1
        without_last = sum(sizes[index] for index in bucket[:-1])
        assert without_last < bucket_bytes


@pytest.mark.parametrize(
    ("sizes", "keys", "limits"),
    [([1, 2], "a", (1, 1)), ([1], "a", (0, 1)), ([1], "a", (1, -1))],
)
def test_bad_arguments_are_refused(sizes, keys, limits):
    with pytest.raises(ValueError, match=r"key|positive"):
        plan_buckets(sizes, keys, bucket_bytes=limits[0], first_bucket_bytes=limits[1])


@given(st.integers(0, 100), st.integers(1, 20))
def test_even_split_covers_the_range_in_runs_of_equal_length(count, parts):
    runs = split_evenly(count, parts)
    assert [index for run in runs for index in run] == list(range(count))
    lengths = [len(run) for run in runs]
    assert len(runs) == min(count, parts)
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_split_into_no_parts_is_refused():
    with pytest.raises(ValueError, match="positive"):
        split_evenly(3, 0)
