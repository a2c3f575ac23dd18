"""Judging what the workers reported: only a full, clean report from every rank passes."""

import json

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.install.check_worker import MARK
from hvdkit.install.prove import check_framework, judge


def make_line(rank, check="broadcast", error=""):
    report = json.dumps({"rank": rank, "check": check, "error": error})
    return f"[{rank}]<stdout>:{MARK}{report}"


def test_every_rank_of_every_check():
    lines = [make_line(rank, check) for check in ("a", "b") for rank in range(2)]
    proof = judge("torch", 2, ["noise", *lines], "")
    assert proof.passed
    assert [outcome.name for outcome in proof.outcomes] == ["a", "b"]
    assert proof.last_lines == ()


def test_an_error_names_its_rank():
    proof = judge("torch", 2, [make_line(0), make_line(1, error="got 1, expected 2")], "")
    assert not proof.passed
    assert proof.outcomes[0].errors == {1: "got 1, expected 2"}


@pytest.mark.parametrize("torn", ['{"rank": 1, "chec', '{"rank": 1}', "[]"])
def test_a_rank_that_is_silent_or_torn_has_failed(torn):
    for line in (f"[1]<stdout>:{MARK}{torn}", "nothing"):
        proof = judge("torch", 2, [make_line(0), line], "")
        assert not proof.passed
        assert proof.outcomes[0].errors == {1: "no report"}


def test_no_report_at_all():
    proof = judge("torch", 2, ["Traceback", "ImportError: no torch"], "")
    assert not proof.passed
    assert "no worker reported" in proof.failure
    assert proof.last_lines == ("Traceback", "ImportError: no torch")


def test_a_failed_launch_fails_though_all_reported():
    proof = judge("torch", 1, [make_line(0)], "horovodrun exited with code 1")
    assert not proof.passed


@pytest.mark.parametrize("np", [0, -2])
def test_no_workers_is_an_error(np):
    with pytest.raises(HvdkitError, match=f"at least 1, found {np}"):
        check_framework("torch", np)


def test_the_workers_words_come_before_the_launchers_traceback():
    workers = [f"[{rank}]<stderr>:ImportError: no such library" for rank in range(2)]
    launcher = ["Traceback (most recent call last):", "RuntimeError: exited with non-zero"] * 20
    proof = judge("torch", 2, [*workers, *launcher], "horovodrun exited with code 1")
    assert proof.last_lines == tuple(workers)
    under_mpi = ["[1,0]<stderr>:ImportError: no such library"]
    assert judge("torch", 1, [*under_mpi, *launcher], "failed").last_lines == tuple(under_mpi)
    # No worker got as far as that: then it is the launcher that knows.
    assert judge("torch", 2, launcher, "failed").last_lines[-1] == launcher[-1]
