"""One piece of work at a time, whose error is not lost."""

import threading

import pytest

from hvdkit.background import BackgroundWork


def test_work_runs_beside_the_caller_and_one_at_a_time():
    work, go, done = BackgroundWork(), threading.Event(), []
    work.start(lambda: (go.wait(30), done.append(1)))
    assert done == []
    go.set()
    work.start(lambda: done.append(2 if done == [1] else "too early"))
    work.wait()
    assert done == [1, 2]


def test_an_error_is_kept_until_it_is_raised_once(caplog):
    work = BackgroundWork()
    work.start(lambda: 1 / 0)
    work.settle()
    assert "division by zero" in caplog.text
    with pytest.raises(ZeroDivisionError):
        work.start(lambda: None)
    work.wait()
    work.start(lambda: None)
    work.wait()


def test_work_may_settle_what_it_is_itself():
    work, done = BackgroundWork(), []
    work.start(lambda: (work.settle(), done.append(1)))
    work.wait()
    assert done == [1]
