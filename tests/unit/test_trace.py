"""The trace of a rank: what it writes, what it costs when off, and how clocks are compared."""

import json
import threading

import pytest

from hvdkit import trace
from hvdkit.errors import HvdkitError


@pytest.fixture(autouse=True)
def closed():
    yield
    trace.start(0, 1, "none", lambda obj, name: [obj], {})


def start_alone(folder, **variables):
    environ = {trace.VARIABLE: str(folder), **variables}
    trace.start(0, 1, "torch", lambda obj, name: [obj], environ)


def read(folder):
    return [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]


def test_steps_follow_each_other_and_hold_their_spans(tmp_path):
    start_alone(tmp_path)
    trace.end("wait")  # was never begun
    for _ in range(2):
        trace.begin("backward")
        trace.end("backward")
        with trace.span("wait"):
            trace.begin("broken off")
        trace.end_step()
    header, first, second = read(tmp_path)  # written already: nothing waits for the end
    assert (header["rank"], header["size"], header["clock_offset_us"]) == (0, 1, 0)
    assert [first["step"], second["step"]] == [0, 1]
    assert second["begin"] == first["end"] <= second["end"]
    for step in (first, second):
        assert [name for name, _, _ in step["spans"]] == ["backward", "wait"]
        for _, begin, length in step["spans"]:
            assert step["begin"] <= begin <= begin + length <= step["end"]


def test_what_comes_before_the_first_span_is_no_step(tmp_path):
    start_alone(tmp_path)
    trace.end_step()
    assert len(read(tmp_path)) == 1
    trace.end_step()
    assert len(read(tmp_path)) == 2


@pytest.mark.parametrize("variables", [{}, {"HOROVOD_ELASTIC": "1"}])
def test_it_is_off_unless_asked_for(tmp_path, variables):
    folder = {trace.VARIABLE: str(tmp_path)} if variables else {}
    trace.start(0, 2, "torch", lambda obj, name: pytest.fail("a collective"), folder | variables)
    with trace.span("wait"):
        trace.begin("backward")
    trace.end_step()
    assert not list(tmp_path.iterdir())


def test_a_script_that_never_ends_a_step_keeps_a_bounded_number_of_spans(tmp_path):
    start_alone(tmp_path)
    for _ in range(5000):
        with trace.span("wait"):
            pass
    trace.end_step()
    assert len(read(tmp_path)[1]["spans"]) == 4096


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(HvdkitError, match=r"cannot write a trace into .*none"):
        start_alone(tmp_path / "none")


def test_the_offset_of_another_clock_is_found(monkeypatch):
    """Two threads meet as two hosts would; the second one's clock is an hour ahead."""
    ahead_us = 3600e6
    clock = trace._now_us
    local = threading.local()
    monkeypatch.setattr(trace, "_now_us", lambda: clock() + local.ahead)
    monkeypatch.setattr(trace, "_read_boot", lambda: str(local.ahead))
    barrier = threading.Barrier(2)
    table, found = [None, None], {}

    def run(rank):
        local.ahead = ahead_us * rank

        def gather(obj, name):
            table[rank] = obj
            barrier.wait()
            everyone = list(table)
            barrier.wait()
            return everyone

        found[rank] = trace.measure_offset(rank, gather)

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == (0, 0)
    offset_us, error_us = found[1]
    assert abs(offset_us - ahead_us) <= error_us
    assert error_us < 1e6
