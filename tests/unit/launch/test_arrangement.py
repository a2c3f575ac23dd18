"""What ranks are told once they are all there."""

from dataclasses import replace

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.launch.arrangement import (
    Arrival,
    check_arrivals,
    choose_addresses,
    describe_missing,
    name_hosts,
)

FIRST = Arrival(0, 3, "a", "1", 11, "127.0.0.1")
SECOND = Arrival(1, 3, "b", "2", 12, "10.0.0.1")
THIRD = Arrival(2, 3, "b", "2", 13, "10.0.0.1")


def test_all_are_there_in_the_order_of_ranks():
    assert check_arrivals([THIRD, FIRST], 3) is None
    assert check_arrivals([THIRD, FIRST, SECOND], 3) == [FIRST, SECOND, THIRD]


def test_a_rank_that_came_twice_and_another_size_are_errors():
    with pytest.raises(HvdkitError, match="rank 1: 12 on b and 99 on c"):
        check_arrivals([FIRST, SECOND, replace(SECOND, pid=99, host="c")], 3)
    with pytest.raises(HvdkitError, match=r"rank 1 \(process 12 on b\) .* 2 workers, rank 0 .* 3"):
        check_arrivals([FIRST, replace(SECOND, size=2)], 3)


def test_the_missing_are_named():
    text = describe_missing([FIRST], 3, 120)
    assert "ranks 1, 2 of 3 did not come within 120 s; there: 0 (a)" in text
    assert "rank 2 of 3" in describe_missing([FIRST, SECOND], 3, 0.5)
    assert "8, ... (99 in all)" in describe_missing([FIRST], 100, 1)


def test_what_came_over_the_network_is_read_again_or_refused():
    assert Arrival.from_text(FIRST.to_text()) == FIRST
    for text in ("", "[]", "{}", replace(FIRST, address="nowhere").to_text()):
        with pytest.raises((ValueError, TypeError)):
            Arrival.from_text(text)


def test_hosts_of_one_name_are_told_apart():
    arrivals = [FIRST, SECOND, replace(THIRD, machine="3"), replace(SECOND, rank=3)]
    assert name_hosts(arrivals) == ["a", "b", "b-2", "b"]


def test_those_beside_the_server_take_the_address_that_the_others_use():
    arrivals = [FIRST, SECOND, THIRD, replace(THIRD, rank=3, address="10.1.0.1")]
    assert choose_addresses(arrivals, "abbc") == ["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.1.0.1"]


def test_one_host_needs_no_network():
    arrivals = [replace(FIRST, address="10.0.0.1"), FIRST]
    assert choose_addresses(arrivals, "aa") == ["127.0.0.1"] * 2


def test_this_process_says_who_it_is():
    arrival = Arrival.of_this_process(1, 2, "10.0.0.1")
    assert arrival == Arrival.of_this_process(1, 2, "10.0.0.1")
    assert (arrival.rank, arrival.size, arrival.address) == (1, 2, "10.0.0.1")
