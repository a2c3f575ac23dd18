"""`hvdkit profile` as a user runs it, with real workers."""

import json
import sys
from pathlib import Path

import pytest

from hvdkit.results.files import read_result
from tests.system.command import find_processes_naming, run_hvdkit

SCRIPT = Path(__file__).with_name("profiled_training.py")
RECORDED = Path(__file__).parents[1] / "unit" / "profile" / "recorded"
STEPS = 12
QUIET = {"OMP_NUM_THREADS": "1"}


def run_profile(*arguments, **variables):
    return run_hvdkit("profile", *arguments, **(QUIET | variables))


def train(*numbers):
    return ["--", sys.executable, str(SCRIPT), *map(str, numbers)]


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slow_rank_is_named_and_its_time_is_seen(tmp_path, slow):
    output, trace = tmp_path / "result.json", tmp_path / "trace.json"
    options = ["-np", 2, "--every-negotiation", "--output", output, "--trace", trace]
    done = run_profile(*options, *train(slow, STEPS), TMPDIR=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 trained" in done.stdout
    assert f"rank {slow} is the straggler" in done.stdout
    assert not list(tmp_path.glob("hvdkit-profile-*"))
    [run] = read_result(output)["summary"]["runs"]
    assert run["workers"] == 2
    assert run["steps"]["count"] >= STEPS - 3  # without the first, and what the end cuts off
    assert run["steps"]["phases"]["step"]["median_s"] > 0.03
    for kind in ("negotiations", "waits"):
        found = run["stragglers"][kind]
        assert found["straggler"] == slow, found
        assert found["ranks"][slow]["last"] > found["meetings"] / 2
        assert found["ranks"][slow]["mean_late_s"] > 0.015
    # All negotiations of steps have been seen: the cache was off.
    assert (
        run["stragglers"]["negotiations"]["meetings"] == run["stragglers"]["negotiations"]["total"]
    )
    ranks = {rank["rank"]: rank for rank in run["hidden"]["ranks"]}
    assert ranks[1 - slow]["waited_for_ranks_s"] > 0.015 > ranks[slow]["waited_for_ranks_s"]
    assert all(0 <= rank["share"] <= 1 for rank in ranks.values())
    check_trace(trace, ranks=2)


def check_trace(path, ranks):
    """Every event has what viewers want, and the ranks' events lie on Horovod's time."""
    events = json.loads(path.read_text(encoding="utf-8"))
    assert all({"ph", "ts", "pid"} <= set(event) for event in events)
    names = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert len(names) == 1 + ranks
    steps = [
        [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == one["pid"]]
        for one in names
        if one["args"]["name"].startswith("rank")
    ]
    assert len(steps) == ranks
    begin = max(min(times)[0] for times in steps)
    end = min(max(times)[1] for times in steps)
    assert begin < end
    reductions = [
        e["ts"] for e in events if e["ph"] == "B" and e["name"].startswith(("GLOO", "MPI"))
    ]
    assert any(begin < at < end for at in reductions)


def test_a_table_over_numbers_of_workers(tmp_path):
    output, folder = tmp_path / "result.json", tmp_path / "kept"
    options = ["-np", "1,2", "--output", output, "--folder", folder]
    done = run_profile(*options, *train(-1, STEPS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 worker(s)" in done.stdout
    assert "2 worker(s)" in done.stdout
    one, two = read_result(output)["summary"]["runs"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert one["hidden"] is None
    assert one["steps"]["phases"]["backward"]["median_s"] > 0
    assert two["hidden"]["exchange_s"] > 0
    # What was kept can be read again.
    again = run_profile(folder / "np-2" / "timeline.json")
    assert again.returncode == 0, again.stderr
    assert "hidden behind the backward pass" in again.stdout
    # And is not mixed with another run.
    refused = run_profile("-np", "2", "--folder", folder, *train(-1, STEPS))
    assert refused.returncode == 1
    assert "is there already" in refused.stderr


def test_a_command_that_fails_is_an_error_and_summarized(tmp_path):
    done = run_profile("-np", 2, *train(1, STEPS, 7), TMPDIR=tmp_path)
    assert done.returncode == 1
    assert "with 2 worker(s) the command ended with" in done.stderr
    assert "rank 1 is the straggler" in done.stdout
    assert not find_processes_naming(str(tmp_path))


def test_a_command_without_horovod_is_an_error():
    done = run_profile("-np", 1, "--", sys.executable, "-c", "print('no horovod')")
    assert done.returncode == 1
    assert "no horovod" in done.stdout
    assert "Horovod wrote no timeline" in done.stderr


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_steps_of_keras_are_traced(tmp_path, backend):
    output = tmp_path / "result.json"
    command = ["--", sys.executable, "examples/tensorflow/digits_keras.py", "--epochs", 1]
    done = run_profile("-np", 2, "--output", output, *command, KERAS_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = read_result(output)["summary"]["runs"]
    assert run["steps"]["by"] == "rank 0's trace"
    assert run["steps"]["count"] > 10
    if backend == "torch":
        # Reduced after the backward pass, so little is hidden; how little depends on the load.
        assert 0 <= run["hidden"]["share"] < 1
        assert run["hidden"]["exchange_s"] > 0
    else:  # inside the graph
        assert run["hidden"] is None
        assert any("TensorFlow" in note for note in run["notes"])


def test_files_are_not_overwritten(tmp_path):
    timeline = RECORDED / "every_negotiation.json"
    for option, name in (("--output", "result.json"), ("--trace", "trace.json.gz")):
        path = tmp_path / name
        path.write_text("mine")
        done = run_profile(timeline, option, path)
        assert done.returncode == 1
        assert "--force" in done.stderr
        assert path.read_text() == "mine"
        done = run_profile(timeline, option, path, "--force")
        assert done.returncode == 0, done.stderr
        assert path.read_bytes() != b"mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a timeline"),
        (["-np", "2"], "name a timeline"),
        (["python", "train.py"], "-np 2"),
        (["-np", "two", "--", "true"], "no list of numbers"),
        (["-np", "2,2", "--", "true"], "twice"),
        (["-np", "0", "--", "true"], "no list of numbers"),
        (["t.json", "--hosts", "a:1"], "go with -np"),
        (["-np", "2", "--hosts", "a:1,b:1", "--", "true"], "--folder"),
        (["-np", "1,2", "--trace", "t.json", "--", "true"], "one number"),
        (["t.json", "--trace", "t.txt"], ".json or .json.gz"),
    ],
)
def test_usage(arguments, words):
    done = run_profile(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_bad_file_is_one_line(tmp_path):
    (tmp_path / "log.txt").write_text("epoch 1\n")
    for name, words in (("log.txt", "is no timeline"), ("none.json", "cannot read")):
        done = run_profile(tmp_path / name)
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
