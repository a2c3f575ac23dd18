"""What an all-reduce costs: by arithmetic, against rings that are followed hop by hop."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import HvdkitError
from hvdkit.profile.allreduce_cost import ALGORITHMS, Link, estimate_allreduce_s
from tests.unit.profile.simulation import Cluster, ring_s

latencies = st.floats(0, 1e-3)
bandwidths = st.floats(1e6, 1e12)
links = st.builds(Link, latencies, bandwidths)
sizes = st.floats(1, 1e10)
counts = st.integers(1, 4096)


def test_two_levels_by_hand():
    within, between = Link(1e-6, 10e9), Link(10e-6, 1e9)
    known = {"workers_per_host": 4, "within": within, "between": between}
    # 12 workers on 3 hosts: 22 hops, of which 4 lead to another host; 22/12 of the bytes there.
    ring = estimate_allreduce_s(1e9, 12, **known)
    assert ring == pytest.approx(18 * 1e-6 + 4 * 10e-6 + 22 / 12)
    # 3 hops and 3/4 of the bytes, twice; 2 hops between hosts and 2/3 of the bytes, twice.
    levels = estimate_allreduce_s(1e9, 12, **known, algorithm="hierarchical")
    assert levels == pytest.approx(2 * (3e-6 + 0.075) + 2 * (2 * 10e-6 + 2 / 3))


def follow(workers, per_host, size):
    """Return the seconds of a ring hop by hop, and what is estimated for it."""
    cluster = Cluster(per_host=per_host, cores=64)
    estimate_s = estimate_allreduce_s(
        size,
        workers,
        workers_per_host=per_host,
        within=Link(cluster.latency_s, cluster.bandwidth),
        between=Link(cluster.network_latency_s, cluster.network_bandwidth),
    )
    return ring_s(cluster, workers, size, random.Random(0)), estimate_s


@pytest.mark.parametrize("size", [1e3, 1e5, 1e6, 1e8])
@pytest.mark.parametrize(("workers", "per_host"), [(2, 8), (3, 8), (8, 8), (6, 1), (16, 1)])
def test_a_ring_of_equal_links_takes_what_its_hops_take_one_by_one(workers, per_host, size):
    followed_s, estimate_s = follow(workers, per_host, size)
    assert estimate_s == pytest.approx(followed_s, rel=0.08)


@pytest.mark.parametrize(("workers", "per_host"), [(16, 4), (64, 8)])
def test_a_ring_over_unequal_links(workers, per_host):
    # By latency or by bandwidth alone; in between, pieces that queue hide some of the latency.
    for size in (1e2, 1e9):
        followed_s, estimate_s = follow(workers, per_host, size)
        assert estimate_s == pytest.approx(followed_s, rel=0.08)
    followed_s, estimate_s = follow(workers, per_host, 1e6)
    assert 0.6 * estimate_s < followed_s < 1.05 * estimate_s


@given(sizes, counts, st.integers(1, 64), links, links, st.sampled_from(ALGORITHMS))
def test_no_time_is_negative_and_one_worker_takes_none(size, n, per_host, within, between, name):
    known = {"workers_per_host": per_host, "within": within, "between": between, "algorithm": name}
    assert estimate_allreduce_s(size, 1, **known) == 0
    assert estimate_allreduce_s(size, n, **known) >= 0


@given(sizes, counts, links)
def test_with_one_worker_a_host_both_algorithms_are_the_same_ring(size, workers, between):
    known = {"workers_per_host": 1, "within": None, "between": between}
    ring, levels = (estimate_allreduce_s(size, workers, **known, algorithm=a) for a in ALGORITHMS)
    assert levels == pytest.approx(ring)


@given(sizes, st.integers(2, 64), links)
def test_on_one_host_both_algorithms_are_the_same_ring(size, workers, within):
    known = {"workers_per_host": 64, "within": within, "between": None}
    ring, levels = (estimate_allreduce_s(size, workers, **known, algorithm=a) for a in ALGORITHMS)
    assert levels == pytest.approx(ring)


@given(
    sizes,
    counts,
    st.integers(1, 64),
    links,
    links,
    st.sampled_from(ALGORITHMS),
    st.floats(1, 100),
    st.booleans(),
)
def test_better_links_never_cost_more(size, n, per_host, within, between, name, factor, inside):
    def cost(a, b):
        return estimate_allreduce_s(
            size, n, workers_per_host=per_host, within=a, between=b, algorithm=name
        )

    worse = within if inside else between
    quick = Link(worse.latency_s / factor, worse.bandwidth_bytes_per_s)
    wide = Link(worse.latency_s, worse.bandwidth_bytes_per_s * factor)
    for better in (quick, wide):
        pair = (better, between) if inside else (within, better)
        assert cost(*pair) <= cost(within, between)


def test_what_is_missing_is_named():
    link = Link(0, 1e9)
    with pytest.raises(HvdkitError, match=r"4 workers costs within a host .*--intra-bandwidth"):
        estimate_allreduce_s(1, 8, workers_per_host=4, within=None, between=link)
    with pytest.raises(HvdkitError, match=r"2 hosts costs between hosts .*--bandwidth-gbit-s"):
        estimate_allreduce_s(1, 8, workers_per_host=4, within=link, between=None)


@pytest.mark.parametrize("values", [(-1, 1), (float("nan"), 1), (0, 0), (0, float("inf"))])
def test_no_link_is_like_that(values):
    with pytest.raises(HvdkitError, match="must be"):
        Link(*values)
