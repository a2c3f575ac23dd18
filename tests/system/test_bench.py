"""``hvdkit bench optimizer`` as a user runs it: real workers under horovodrun, few steps."""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest

from hvdkit.results.files import read_result
from tests.system.command import ROOT, find_processes_naming

ROUNDS, STEPS, WORKERS = 2, 3, 2
# From the layers: 8 x (1024 x 1024 + 1024) and 1024 x 10 + 10; 100 x (64 x 64 + 64 + 2 x 64) and
# 64 x 10 + 10; convolutions of 3 x 3 with biases and two vectors of batch norm each, and 256 x 10.
CHANNELS = [3, 32, 64, 64, 128, 128, 256, 256]
SHAPES = {
    "mlp": (18, 8 * (1024 * 1024 + 1024) + 1024 * 10 + 10),
    "many-small": (402, 100 * (64 * 64 + 3 * 64) + 64 * 10 + 10),
    "cnn": (
        30,
        sum(9 * a * b + 3 * b for a, b in itertools.pairwise(CHANNELS)) + 2570,
    ),
}


def run_hvdkit(*arguments, timeout_s=300, **variables):
    """Run the command line from the source tree and return the finished process."""
    code = "from hvdkit.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "bench", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def measure(tmp_path, *arguments):
    """Run the benchmark for few steps; return its result and what it printed."""
    path = tmp_path / "result.json"
    numbers = ["--rounds", str(ROUNDS), "--steps", str(STEPS), "-np", str(WORKERS)]
    with tempfile.TemporaryDirectory() as folder:
        done = run_hvdkit("optimizer", *numbers, "--output", str(path), *arguments, TMPDIR=folder)
        assert not find_processes_naming(folder), "a worker outlived the benchmark"
        assert not list(Path(folder).glob("hvdkit-bench-*"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(path)
    assert result["driver"] == "optimizer"
    return result, done.stdout


def find_samples(result):
    """Return the step times by model and candidate."""
    return {
        (one["labels"]["model"], one["labels"]["candidate"]): one["samples"]
        for one in result["series"]
    }


def test_every_candidate_is_measured_and_compared(tmp_path):
    result, shown = measure(tmp_path, "--models", "many-small")
    measured = result["summary"]["models"]["many-small"]
    step_s = find_samples(result)
    assert list(measured["candidates"]) == ["hvdkit", "horovod", "ddp", "single"]
    for name, candidate in measured["candidates"].items():
        rounds = step_s["many-small", name]
        lengths = [[len(rank) for rank in turn] for turn in rounds]
        assert lengths == [[STEPS] * WORKERS] * ROUNDS, name
        slowest = [median(map(max, zip(*turn, strict=True))) for turn in rounds]
        assert candidate["median_step_s"] == pytest.approx(median(slowest))
        assert candidate["median_step_s"] > 0
        assert name in shown
    pairs = {
        (pair["candidate"], pair["reference"]): pair for pair in result["summary"]["comparisons"]
    }
    assert list(pairs) == list(itertools.combinations(measured["candidates"], 2))
    for pair in pairs.values():
        interval = pair["geometric_mean"]
        assert 0 < interval["low"] <= interval["estimate"] <= interval["high"]


def test_tensorflow_has_candidates_of_its_own(tmp_path):
    result, _ = measure(tmp_path, "--framework", "tensorflow", "--models", "many-small")
    measured = result["summary"]["models"]["many-small"]
    assert list(measured["candidates"]) == ["hvdkit", "horovod", "mwms", "single"]
    assert (measured["tensors"], measured["parameters"]) == SHAPES["many-small"]


def test_keras_is_measured_in_fit(tmp_path):
    options = ["--framework", "keras", "--candidates", "hvdkit,horovod"]
    result, _ = measure(tmp_path, *options, "--models", "cnn")
    measured = result["summary"]["models"]["cnn"]
    assert (measured["tensors"], measured["parameters"]) == SHAPES["cnn"]
    assert [len(turn[0]) for turn in find_samples(result)["cnn", "hvdkit"]] == [STEPS] * ROUNDS


def test_every_model_is_what_it_says(tmp_path):
    result, _ = measure(tmp_path, "--models", ",".join(SHAPES), "--candidates", "single")
    assert list(result["summary"]["models"]) == list(SHAPES)
    assert result["summary"]["comparisons"] == []
    for model, measured in result["summary"]["models"].items():
        assert (measured["tensors"], measured["parameters"]) == SHAPES[model]
        assert measured["threads"] == 1
        peaks = measured["candidates"]["single"]["peak_rss_bytes"]
        assert len(peaks) == WORKERS
        # Weights and gradients, at least, have to be resident.
        assert min(peaks) > 2 * 4 * measured["parameters"]


def test_all_reduces_are_measured_and_right(tmp_path):
    path = tmp_path / "result.json"
    sizes = ["--sizes", "4K,4M", "--dtypes", "float32,float16", "--rounds", str(ROUNDS)]
    done = run_hvdkit("allreduce", *sizes, "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all sums right" in done.stdout
    result = read_result(path)
    found = {
        (one["labels"]["candidate"], one["labels"]["dtype"], one["labels"]["size_bytes"])
        for one in result["series"]
    }
    candidates = ("hvdkit", "horovod", "torch", "copy")
    assert found == set(itertools.product(candidates, ("float32", "float16"), (4096, 4 << 20)))
    for one in result["series"]:
        assert [len(ranks) for ranks in one["samples"]] == [WORKERS] * ROUNDS
    assert result["summary"]["bucket_size_bytes"] in {1 << power for power in range(20, 27)}
    for row in result["summary"]["messages"]:
        assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(row["size_bytes"] / row["time_s"])


def test_a_message_of_several_tensors(tmp_path):
    path = tmp_path / "result.json"
    message = ["--sizes", "40K", "--tensors", "7", "--candidates", "hvdkit,torch", "--rounds", "1"]
    done = run_hvdkit("allreduce", *message, "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {one["labels"]["tensors"] for one in read_result(path)["series"]} == {7}


def test_workers_that_cannot_start_give_their_own_last_words(tmp_path):
    # A torch that fails to import, found before the real one.
    (tmp_path / "torch.py").write_text('raise ImportError("this torch is broken")\n')
    code = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path)!r};"
    code += "from hvdkit.cli import main; main()"
    arguments = ["bench", "optimizer", "--models", "mlp", "--candidates", "single"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "'single' on 'mlp' ended before it was ready" in done.stderr
    assert "this torch is broken" in done.stderr
    assert "Traceback" not in done.stderr.split("its last lines were:")[0]


def test_a_benchmark_that_is_told_to_end_leaves_no_worker(tmp_path):
    code = "from hvdkit.cli import main; main()"
    arguments = ["bench", "optimizer", "--models", "many-small", "--candidates", "single,ddp"]
    driver = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--rounds", "100000"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 120
    while not find_processes_naming(str(tmp_path), suspended=True):
        assert time.monotonic() < deadline_s, "no worker waits for its turn"
        time.sleep(0.2)
    driver.terminate()
    assert driver.wait(60) == 128 + signal.SIGTERM
    assert not find_processes_naming(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mlp,nope"], "models must be distinct names from mlp, many-small, cnn"),
        (["--candidates", ""], "candidates must be distinct names"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--output", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json: No such file"),
        (["--output", __file__], "is there already: name another file, or pass --force"),
        (["--output", "/proc/all.json"], "cannot write /proc/all.json"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, message):
    done = run_hvdkit("optimizer", *arguments, timeout_s=30)
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
