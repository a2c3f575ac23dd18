"""Finding what ranks hold differently; here ranks are threads and the collective is a barrier."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.agreement import demand_equal_entries, describe_versions, find_difference
from hvdkit.errors import HvdkitError, RankDisagreementError


def run_ranks(lists, call):
    """Call on one thread a rank; return the results or errors, and the bytes that rank 0 sent."""
    barrier, slots, sent = threading.Barrier(len(lists), timeout=20), {}, []

    def act(rank):
        def gather(obj, name):
            slots[rank] = name, pickle.dumps(obj)
            if rank == 0:
                sent.append(len(slots[0][1]))
            barrier.wait()
            assert len({name for name, _ in slots.values()}) == 1
            received = [pickle.loads(slots[rank][1]) for rank in range(len(lists))]
            barrier.wait()
            return received

        try:
            return call(lists[rank], name="test", gather=gather, ranks=range(len(lists)))
        except HvdkitError as error:
            return error

    with ThreadPoolExecutor(len(lists)) as pool:
        return list(pool.map(act, range(len(lists)))), sent


@settings(deadline=None, max_examples=40)
@given(
    lists=st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), max_size=70),
        min_size=2,
        max_size=3,
    )
)
def test_the_first_difference_is_found_alike_on_all_ranks(lists):
    results, _ = run_ranks(lists, find_difference)
    assert all(result == results[0] for result in results)
    first = next(
        (
            index
            for index in range(max(map(len, lists)))
            if len({tuple(one[index : index + 1]) for one in lists}) > 1
        ),
        None,
    )
    if first is None:
        assert results[0] is None
    else:
        assert results[0].index == first
        held = {rank: entry for entry, ranks in results[0].versions for rank in ranks}
        assert held == {
            rank: one[first] if first < len(one) else None for rank, one in enumerate(lists)
        }


def test_little_travels_however_long_the_lists():
    lists = [[(f"parameter {i}", "x" * 50) for i in range(10_000)] for _ in range(2)]
    results, sent = run_ranks(lists, find_difference)
    assert results == [None, None]
    assert len(sent) == 1
    assert sum(sent) < 100
    lists[1][8765] = ("parameter 8765", "y" * 100_000)
    results, sent = run_ranks(lists, find_difference)
    assert [result.index for result in results] == [8765, 8765]
    assert len(sent) <= 6
    assert max(sent) < 1500
    assert len(str(results[0])) < 1500


def test_long_texts_that_differ_at_their_end_differ():
    lists = [[("groups", "x" * 5000 + tail)] for tail in "ab"]
    results, _ = run_ranks(lists, find_difference)
    assert [ranks for _, ranks in results[0].versions] == [[0], [1]]
    assert str(results[0]).count("5001 characters") == 2


def test_many_versions_are_counted_not_listed():
    results, _ = run_ranks(
        [[("seed", str(rank))] for rank in range(9)], partial(demand_equal_entries, "Data")
    )
    assert len({str(error) for error in results}) == 1
    assert str(results[0]).endswith("rank 5 has 5; 3 more ranks have yet others")


def test_an_error_of_one_rank_reaches_all():
    problem = HvdkitError("no data yet")
    results, _ = run_ranks([[("a", "b")], problem, []], find_difference)
    assert results[1] is problem
    assert [str(results[rank]) for rank in (0, 2)] == ["rank 1: no data yet"] * 2
    assert isinstance(results[0], RankDisagreementError)


def test_builds_of_one_version_are_the_same_version():
    assert describe_versions({"X": "2.9.1+cpu"}) == describe_versions({"X": "2.9.1+cu128"})
    assert describe_versions({"X": "2.9.1"}) != describe_versions({"X": "2.10.0"})
