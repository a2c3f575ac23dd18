"""Recorded timelines of real runs, summarized; what is expected was worked out by hand from them.

Two workers trained three layers of 256 x 256 for five steps; rank 1 slept 30 ms in each.
"""

import gzip
import json
import shutil
import subprocess
import sys

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.profile.summary import summarize
from hvdkit.results.files import check_result, make_result
from tests.unit.profile.timelines import RECORDED, ROOT, write_timeline

EVERY = RECORDED / "every_negotiation.json"
FUSED = RECORDED / "fused.json"
TRACED = RECORDED / "traced" / "timeline.json"


def find(summary, name):
    [tensor] = [one for one in summary["tensors"] if one["name"].endswith(name)]
    return tensor


def test_phases_of_a_tensor_are_those_of_the_file():
    tensor = find(summarize(EVERY).summary, "direct.4")
    # Four operations; the fifth was cut off when the script ended.
    assert tensor["count"] == 4
    assert tensor["kind"] == "ALLREDUCE"
    assert tensor["size_bytes"] == 65536 * 4
    assert tensor["total_s"] == pytest.approx((2516 + 34138 + 33855 + 31806) / 4e6)
    means = {name: phase["mean_s"] for name, phase in tensor["phases"].items()}
    assert means == pytest.approx(
        {
            "negotiation": (547 + 33459 + 33192 + 30860) / 4e6,
            "queue": (97 + 124 + 148 + 193) / 4e6,
            "copy": (26 + 295 + 18 + 25 + 10 + 37 + 17) / 4e6,
            "transfer": (1520 + 545 + 452 + 677) / 4e6,
        }
    )
    assert tensor["phases"]["negotiation"]["max_s"] == pytest.approx(33459e-6)


def test_steps_recur_with_the_first_gradient():
    summary = summarize(EVERY).summary
    steps = summary["steps"]
    assert (steps["count"], steps["by"]) == (3, "recurrence")
    assert steps["phases"]["step"]["median_s"] == pytest.approx(37808e-6)
    assert summary["unfinished"] > 0  # Horovod stops writing before the last ones end
    assert summary["hidden"] is None
    assert any("hidden" in note and "hvdkit profile" in note for note in summary["notes"])


def test_the_slow_rank_is_named_by_every_negotiation():
    found = summarize(EVERY).summary["stragglers"]["negotiations"]
    assert found["straggler"] == 1
    ranks = {rank["rank"]: rank for rank in found["ranks"]}
    assert ranks[0]["last"] == 0
    assert ranks[1]["last"] == found["meetings"] - found["ties"]
    assert 25e-3 < ranks[1]["mean_late_s"] < 35e-3


def test_cached_negotiations_are_counted_and_said():
    summary = summarize(FUSED).summary
    found = summary["stragglers"]["negotiations"]
    assert found["meetings"] < found["total"]
    [note] = [note for note in summary["notes"] if "--every-negotiation" in note]
    assert f"{found['total'] - found['meetings']} of {found['total']}" in note


def test_fused_tensors_share_a_transfer_that_a_step_counts_once():
    summary = summarize(FUSED).summary
    fused = [one for one in summary["tensors"] if one["kind"] == "ALLREDUCE"]
    assert len(fused) > 2
    phases = summary["steps"]["phases"]
    assert 0 < phases["transfer"]["share"] <= phases["operations"]["share"] < 1
    of_tensors = sum(one["phases"]["transfer"]["mean_s"] for one in fused)
    assert phases["transfer"]["median_s"] < of_tensors / 2


def test_hidden_communication_by_the_traces_of_the_ranks():
    summary = summarize(TRACED).summary
    assert summary["workers"] == 2
    assert (summary["steps"]["count"], summary["steps"]["by"]) == (3, "rank 0's trace")
    hidden = summary["hidden"]
    exchange_us = (2010466 - 2009070) + (566 + 837) + (387 + 899)
    exposed_us = (2010021 - 2009070) + (566 + 2044324 - 2043855) + (387 + 2078101 - 2077553)
    assert hidden["exchange_s"] == pytest.approx(exchange_us / 3e6)
    shares = [rank["share"] for rank in hidden["ranks"]]
    # Rank 0 waited all the time for rank 1, whose last layers were still under way.
    assert shares == pytest.approx([0, 1 - exposed_us / exchange_us], abs=1e-9)
    assert hidden["share"] == pytest.approx(sum(shares) / 2)


def test_the_slow_rank_is_named_by_the_waits():
    found = summarize(TRACED).summary["stragglers"]["waits"]
    assert found["straggler"] == 1
    late_us = (29657, 29846, 29598, 29469)
    assert found["meetings"] == 4
    assert found["ranks"][1]["mean_late_s"] == pytest.approx(sum(late_us) / 4e6)
    assert found["ranks"][1]["max_late_s"] == pytest.approx(29846e-6)


@pytest.mark.parametrize("path", [EVERY, FUSED, TRACED])
def test_it_makes_a_result(path):
    profile = summarize(path)
    result = make_result("profile", {}, profile.series, {"runs": [profile.summary]})
    check_result(json.loads(json.dumps(result, allow_nan=False)), "the profile")


def test_traces_of_another_run_are_left_out(tmp_path):
    for path in TRACED.parent.iterdir():
        shutil.copy(path, tmp_path)
    shutil.copy(EVERY, tmp_path / "timeline.json")
    text = (tmp_path / "timeline.json").read_text()
    (tmp_path / "timeline.json").write_text(text.replace('micros":1', 'micros":9', 1))
    summary = summarize(tmp_path / "timeline.json").summary
    assert summary["steps"]["by"] == "recurrence"
    assert any("another run" in note for note in summary["notes"])


def test_a_missing_and_a_cut_trace_are_said_and_survived(tmp_path):
    for path in TRACED.parent.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "rank-1.jsonl").unlink()
    root = tmp_path / "rank-0.jsonl"
    root.write_bytes(root.read_bytes()[:-20])
    summary = summarize(tmp_path / "timeline.json").summary
    assert any("no trace of rank 1" in note for note in summary["notes"])
    assert summary["hidden"]["ranks"][0]["rank"] == 0


def test_a_merged_trace_has_all_ranks_on_one_clock(tmp_path):
    for name in ("trace.json", "trace.json.gz"):
        summarize(TRACED, trace=tmp_path / name)
    events = json.loads((tmp_path / "trace.json").read_text())
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == events
    assert all({"ph", "ts", "pid"} <= set(event) for event in events)
    waits = [e for e in events if e["ph"] == "X" and e["name"] == "wait"]
    assert {e["pid"] for e in waits} == {10, 11}
    exchange = [
        e["ts"] for e in events if e["ph"] == "B" and e.get("name") == "ALLREDUCE" and e["pid"] == 1
    ]
    last = max(e["ts"] + e["dur"] for e in waits if e["pid"] == 11)
    assert min(exchange) < last
    for pid in (10, 11):
        inside = [e for e in waits if e["pid"] == pid]
        assert any(e["ts"] <= at <= e["ts"] + e["dur"] for e in inside for at in exchange)
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "trace.json.gz"}


def test_every_truncation_works_up_to_the_damage(tmp_path):
    data = EVERY.read_bytes()
    whole = summarize(EVERY).summary
    path = tmp_path / "cut.json"
    counted = []
    for size in range(1, len(data) - 1, 397):
        path.write_bytes(data[:size])
        try:
            summary = summarize(path).summary
        except HvdkitError:
            assert size < 110  # the first record is not whole
            continue
        assert any("cut off" in note for note in summary["notes"])
        counted.append(summary["operations"])
    assert counted == sorted(counted)
    assert counted[0] == 0
    assert counted[-1] in (whole["operations"] - 1, whole["operations"])


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for size in (6, 60):
        path = tmp_path / f"{size}.json"
        steps = write_timeline(path, size * 10**6)
        script = (
            "import sys, json, pathlib\n"
            "from hvdkit.profile.summary import summarize\n"
            "from hvdkit.bench.timing import read_peak_rss_bytes\n"
            "found = summarize(pathlib.Path(sys.argv[1])).summary\n"
            "print(json.dumps([read_peak_rss_bytes(), found]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, path], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        peak, summary = json.loads(done.stdout)
        peaks.append(peak)
        assert summary["operations"] == 200 * steps
        assert summary["steps"]["count"] == steps - 2
        assert summary["steps"]["phases"]["step"]["median_s"] == pytest.approx(22e-3)
        assert summary["steps"]["phases"]["transfer"]["median_s"] == pytest.approx(200 * 50e-6)
        assert summary["stragglers"]["negotiations"]["straggler"] == 7
    assert peaks[1] < 64 << 20
    assert peaks[1] < peaks[0] + (4 << 20)
