"""Records fed by hand: steps, stragglers, lost records, names without end."""

import math

import pytest

from hvdkit.profile import timeline as module
from hvdkit.profile.ranks import Overlap
from hvdkit.profile.sketch import Durations, Reservoir
from hvdkit.profile.stragglers import Lateness
from hvdkit.profile.timeline import Timeline, measure_bytes


def name(pid, text):
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": text}}


def operate(pid, ts, ticks=(), kind="ALLREDUCE"):
    """Negotiate for 10 us, queue for 5, transfer for 20 of 30."""
    yield {"ph": "B", "name": f"NEGOTIATE_{kind}", "ts": ts, "pid": pid}
    for at, rank in ticks:
        yield {"ph": "X", "name": str(rank), "ts": ts + at, "pid": pid, "dur": 0}
    yield {"ph": "E", "ts": ts + 10, "pid": pid}
    yield {"ph": "B", "name": kind, "ts": ts + 15, "pid": pid}
    yield {"ph": "B", "name": "NCCL_ALLREDUCE", "ts": ts + 20, "pid": pid}
    yield {"ph": "E", "ts": ts + 40, "pid": pid}
    yield {"ph": "E", "ts": ts + 45, "pid": pid, "args": {"dtype": "float16", "shape": "[2, 3]"}}


def feed(timeline, *parts):
    for part in parts:
        for record in [part] if isinstance(part, dict) else part:
            timeline.feed(record)
    return timeline


def test_an_operation_now_and_then_begins_no_step():
    timeline = feed(Timeline(), name(1, "first"), name(2, "second"), name(3, "metric"))
    for step in range(5):
        feed(timeline, operate(1, 1000 * step), operate(2, 1000 * step + 100))
        if step == 2:
            feed(timeline, operate(3, 1000 * step + 200))
            feed(timeline, operate(3, 1000 * step + 300, kind="ALLGATHER"))
    rows = timeline.steps.rows()
    assert [row[0] for row in rows] == [1000, 1000, 1000]  # without the first and the last
    assert [row[1:] for row in rows] == [
        (20, 10, 0, 40, 60),
        (40, 20, 0, 80, 120),
        (20, 10, 0, 40, 60),
    ]


def test_overlapping_phases_count_once_in_a_step():
    timeline = feed(Timeline(), name(1, "a"), name(2, "b"))
    for step in range(3):
        both = [*operate(1, 1000 * step), *operate(2, 1000 * step + 5)]
        feed(timeline, sorted(both, key=lambda record: record["ts"]))
    [row] = timeline.steps.rows()
    assert row == (1000, 15, 10, 0, 25, 35)


def test_steps_of_a_trace_cut_what_goes_on():
    found = []
    ends = iter([100.0, 200.0, 230.0, 400.0])
    timeline = Timeline(ends, "opt", lambda begin, end: found.append((begin, end)))
    feed(timeline, name(1, "opt.1"), name(2, "other"))
    feed(timeline, operate(1, 110), operate(1, 202), operate(2, 250), operate(1, 300))
    feed(timeline, operate(1, 500))
    # The second step ends while its operation is carried out, 217 to 247.
    assert timeline.steps.count == 2
    assert [row[0] for row in timeline.steps.rows()] == [30, 170]
    assert [row[5] for row in timeline.steps.rows()] == [13, 17 + 30 + 30]
    assert found == [(217, 247), (315, 345)]


def test_ranks_of_one_cycle_are_equal():
    cycle = {"ph": "i", "name": "CYCLE_START", "s": "g"}
    timeline = feed(Timeline(), name(1, "a"), {**cycle, "ts": 0})
    feed(timeline, operate(1, 10, [(1, 0), (9, 1)]))
    late = list(operate(1, 100, [(1, 1), (8, 0)]))
    feed(timeline, late[:2], {**cycle, "ts": 105}, late[2:])
    summary = timeline.lateness[0].summarize(1000.0)
    assert (summary["meetings"], summary["ties"]) == (2, 1)
    assert [rank["last"] for rank in summary["ranks"]] == [1, 0]
    assert summary["ranks"][0]["sum_late_s"] == pytest.approx(7e-6)


def test_without_marks_ranks_must_be_further_apart_than_a_cycle():
    timeline = feed(Timeline(), name(1, "a"), operate(1, 0, [(0, 0), (10, 1)]))
    assert timeline.lateness[0].ties == 1
    begin, first, _, end, *_ = operate(1, 10_000, [(0, 1), (0, 0)])
    last = {"ph": "X", "name": "0", "ts": 16_000, "pid": 1}
    feed(timeline, begin, first, last, {**end, "ts": 16_000})
    assert timeline.lateness[0].ties == 1
    assert timeline.lateness[0].straggler(10_000) == 0


@pytest.mark.parametrize("lost", range(7))
def test_a_lost_record_costs_one_operation(lost):
    timeline = feed(Timeline(), name(1, "a"))
    broken = [record for index, record in enumerate(operate(1, 0)) if index != lost]
    feed(timeline, broken, *(operate(1, ts) for ts in (1000, 2000, 3000, 4000)))
    tensor = timeline.tensors["a"]
    assert tensor.total.count in (4, 5)
    # Whatever was open is closed: the last steps are as they should be.
    assert timeline.steps.rows()[-1] == (1000, 10, 5, 0, 20, 30)


def test_names_without_end_are_counted_together(monkeypatch):
    monkeypatch.setattr(module, "MOST_TENSORS", 10)
    monkeypatch.setattr(module, "MOST_PIDS", 20)
    timeline = Timeline()
    for pid in range(1, 101):
        feed(timeline, name(pid, f"tensor.{pid}"), operate(pid, 100 * pid))
    assert timeline.operations == 100
    assert timeline.unfinished == 0
    assert len(timeline.tensors) == 11
    assert timeline.tensors[module.OTHERS].total.count == 90
    assert len(timeline._processes) == 20
    assert not timeline._passing


def test_operations_without_a_name_are_one():
    timeline = Timeline()
    for pid in range(1, 6):
        feed(timeline, name(pid, f"allreduce.noname.{pid}"), operate(pid, 100 * pid))
    assert list(timeline.tensors) == ["allreduce.noname.*"]
    assert timeline.unnamed


def test_what_tracing_itself_does_is_left_out():
    timeline = feed(Timeline(), name(1, "allgather.hvdkit.hvdkit.trace.clock"), operate(1, 0))
    assert not timeline.tensors
    assert timeline.operations == timeline.odd == 0


def test_sizes():
    assert measure_bytes({"dtype": "float16", "shape": "[2, 3]"}) == 12
    assert measure_bytes({"dtype": "int64", "shape": "[]"}) == 8
    assert measure_bytes({"dtype": "quaternion", "shape": "[2]"}) is None
    assert measure_bytes({"shape": 3}) is None


def test_quantiles_are_within_their_bins():
    durations = Durations()
    for value in range(1, 1001):
        durations.add(value)
    assert (durations.count, durations.max_us, durations.mean_us()) == (1000, 1000, 500.5)
    for share in (0.05, 0.5, 0.95):
        assert 1000 * share <= durations.quantile_us(share) <= 1000 * share * 1.1
    durations.add(0)
    durations.add(1e13)
    assert durations.quantile_us(1) == 1e13
    assert Durations().quantile_us(0.5) == Durations().mean_us() == 0


def test_a_reservoir_keeps_an_even_sample_in_order():
    reservoir = Reservoir(100)
    for number in range(10_000):
        reservoir.add(number)
    rows = reservoir.rows()
    assert reservoir.count == 10_000
    assert len(rows) == 100
    assert rows == sorted(rows)
    # The mean of 100 out of 10 000 has a standard deviation of 289.
    assert abs(sum(rows) / 100 - 5000) < 4 * 289


def test_overlap_of_times():
    overlap = Overlap([(0, 10), (20, 30), (40, 50)])
    for begin, end in [(5, 8), (9, 22), (25, 26), (28, 45), (60, 70)]:
        overlap.add(begin, end)
    assert overlap.sum_us == 3 + (1 + 2) + 1 + (2 + 5)


def test_a_straggler_must_stand_out():
    even = Lateness()
    for turn in range(100):
        even.add([(0, turn % 4), (10, (turn + 1) % 4)], 0)
    assert even.straggler(100) is None
    one = Lateness()
    for _ in range(100):
        one.add([(0, 0), (0, 1), (50, 2)], 0)
    assert one.straggler(100 * 50) == 2
    assert one.straggler(100 * 50 * 101) is None  # less than 1 % of the time
    assert one.straggler(math.inf) is None
    for _ in range(300):
        one.add([(0, 0), (0, 1), (0, 2)], 0)
    assert one.straggler(100 * 50) is None  # a pause now and then
