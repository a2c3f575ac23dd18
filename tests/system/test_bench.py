"""``hvdkit bench`` as a user runs it: real workers under horovodrun, few steps."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pytest

from hvdkit.bench.models import MODELS
from hvdkit.results.files import read_result
from tests.system.command import ROOT, find_processes_naming

ROUNDS, STEPS, WORKERS = 2, 3, 2


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
    """Run the benchmark of training for few steps; return its result and what it printed."""
    path = tmp_path / "result.json"
    numbers = ["--repeats", str(ROUNDS), "--steps", str(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        done = run_hvdkit("train", *numbers, "--output", str(path), *arguments, TMPDIR=folder)
        assert not find_processes_naming(folder), "a worker outlived the benchmark"
        assert not list(Path(folder).glob("hvdkit-bench-*"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(path)
    assert result["driver"] == "train"
    return result, done.stdout


def index_runs(result):
    """Return the runs by candidate and number of workers."""
    return {(run["candidate"], run["workers"]): run for run in result["summary"]["runs"]}


def test_every_candidate_is_measured_at_every_number_of_workers(tmp_path):
    options = ["--model", "many-small", "--against", "horovod,ddp", "-np", "1,2"]
    result, shown = measure(tmp_path, *options)
    runs = index_runs(result)
    names = ["hvdkit", "horovod", "ddp", "single"]
    assert list(runs) == [(name, workers) for workers in (1, 2) for name in names]
    for series in result["series"]:
        labels = series["labels"]
        run = runs[labels["candidate"], labels["workers"]]
        lengths = [[len(rank) for rank in turn] for turn in series["samples"]]
        assert lengths == [[STEPS] * labels["workers"]] * ROUNDS
        slowest = [median(map(max, zip(*turn, strict=True))) for turn in series["samples"]]
        assert run["step_time_s"] == pytest.approx(median(slowest))
        assert run["samples_per_s"] == pytest.approx(128 * labels["workers"] / median(slowest))
        assert run["scaling"] == "weak"
        # Weights and gradients, at least, have to be resident.
        assert run["peak_memory_bytes"] > 2 * 4 * MODELS["many-small"].parameters
        # The clock must not be what is measured.
        assert run["overhead_share"] < 0.01
    for name in names:
        assert name in shown
        assert runs[name, 2]["scaling_efficiency"] > 0
    assert runs["hvdkit", 2]["communication_share"] < 1
    pairs = [
        (one["workers"], one["candidate"], one["reference"]) for one in result["summary"]["ratios"]
    ]
    assert pairs == [(n, *pair) for n in (1, 2) for pair in itertools.combinations(names, 2)]


@pytest.mark.parametrize(
    ("framework", "peers"),
    [("tensorflow", "horovod,mwms"), ("keras", "mwms"), ("keras-torch", "ddp")],
)
def test_each_framework_has_peers_of_its_own(tmp_path, framework, peers):
    options = ["--framework", framework, "--model", "cnn", "--against", peers, "-np", "2"]
    result, shown = measure(tmp_path, *options, "--batch-size", "4")
    assert [name for name, _ in index_runs(result)] == ["hvdkit", *peers.split(","), "single"]
    if framework.startswith("keras"):
        assert f"{peers}: a loop of its own on the same model, not fit" in shown
    for series in result["series"]:
        lengths = [[len(rank) for rank in turn] for turn in series["samples"]]
        assert lengths == [[STEPS] * WORKERS] * ROUNDS


@pytest.mark.parametrize(
    ("framework", "options"),
    [
        ("torch", ["--accumulate", "3", "--compression", "fp16", "--against", "ddp"]),
        ("torch", ["--bucket-size-mb", "0.5", "--compression", "fp16", "--against", "horovod"]),
        (
            "torch",
            ["--dtype", "bfloat16", "--strong", "--batch-size", "8", "--compression", "bf16"],
        ),
        ("tensorflow", ["--compression", "fp16", "--bucket-size-mb", "0.5"]),
        ("keras", ["--accumulate", "2", "--strong", "--batch-size", "8"]),
    ],
)
def test_options_reach_the_workers_and_the_labels(tmp_path, framework, options):
    options = ["--framework", framework, "--model", "transformer", "-np", "2", *options]
    result, _ = measure(tmp_path, *options)
    given = dict(itertools.pairwise(options))
    passes = int(given.get("--accumulate", 1))
    batch = 8 // WORKERS if "--strong" in options else 8
    for series in result["series"]:
        labels = series["labels"]
        assert labels["scaling"] == ("strong" if "--strong" in options else "weak")
        assert labels["global_batch"] == batch * WORKERS * passes
        assert labels["compression"] == given.get("--compression", "none")
        assert labels["dtype"] == given.get("--dtype", "float32")
        assert labels["batch"] == batch


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_waits_for_a_folder_of_images_are_counted_apart(tmp_path, framework):
    Image = pytest.importorskip("PIL.Image")
    for index in range(12):
        folder = tmp_path / "images" / f"class{index % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 50), (20 * index, 0, 99)).save(folder / f"{index}.png")
    options = ["--framework", framework, "--model", "cnn", "--batch-size", "3", "-np", "2"]
    result, _ = measure(tmp_path, *options, "--input", str(tmp_path / "images"))
    waits = [one for one in result["series"] if one["metric"] == "input_s"]
    steps = [one for one in result["series"] if one["metric"] == "step_s"]
    assert len(waits) == len(steps) == 2
    for wait, step in zip(waits, steps, strict=True):
        assert wait["labels"] == step["labels"]
        for turn in range(ROUNDS):
            for rank in range(WORKERS):
                parts = zip(wait["samples"][turn][rank], step["samples"][turn][rank], strict=True)
                assert all(0 < part <= whole for part, whole in parts)
    assert all(0 < run["input_share"] <= 1 for run in result["summary"]["runs"])
    message = run_hvdkit(
        *["train", "--model", "cnn", "--input", str(tmp_path / "images"), "--batch-size", "7"]
    ).stderr
    assert "holds 12 images" in message
    assert "a batch of 7 for each of 2 workers needs 14" in message


def test_goals_decide_on_the_exit_status(tmp_path):
    path = tmp_path / "result.json"
    options = ["train", "--model", "many-small", "-np", "2", "--repeats", "1", "--steps", "2"]
    options += ["--price-per-worker-hour", "1", "--output", str(path)]
    done = run_hvdkit(*options, "--expect", "samples_per_s>0", "--expect", "step_time_s<=1e-9")
    assert done.returncode == 1
    assert "Missed step_time_s<=1e-09: " in done.stdout
    assert "Missed samples_per_s" not in done.stdout
    (run,) = (run for run in read_result(path)["summary"]["runs"] if run["candidate"] == "hvdkit")
    assert run["cost_per_million_samples"] == pytest.approx(2 / 3600 / run["samples_per_s"] * 1e6)
    done = run_hvdkit(*options, "--force", "--expect", "cost_per_million_samples<=1e9")
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_frameworks_build_the_same_models():
    """Shapes are compared up to the order of their axes: frameworks lay weights out differently."""
    code = """if True:
        import json
        from hvdkit.bench.models import MODELS, keras_models, torch_models
        found = {}
        for name in MODELS:
            one, other = torch_models.build(name), keras_models.build(name)
            found[name] = (
                sorted(parameter.numel() for parameter in one.parameters()),
                sorted(int(variable.value.shape.num_elements())
                    for variable in other.trainable_variables),
            )
        print(json.dumps(found))
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["KERAS_BACKEND"] = "tensorflow"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == list(MODELS)
    for name, (in_torch, in_keras) in found.items():
        assert in_torch == in_keras, name
        assert (sum(in_torch), len(in_torch)) == (MODELS[name].parameters, MODELS[name].tensors)


@pytest.mark.parametrize("model", ["resnet50", "vgg16"])
def test_large_models_train(tmp_path, model):
    options = ["--model", model, "--batch-size", "1", "-np", "1"]
    result, _ = measure(tmp_path, *options)
    assert index_runs(result)["hvdkit", 1]["parameters"] == MODELS[model].parameters


def test_a_running_job_gives_its_ranks(tmp_path):
    path = tmp_path / "result.json"
    arguments = ["--model", "many-small", "-np", "1,2", "--against", "ddp", "--repeats", "1"]
    arguments += ["--steps", "2", "--output", str(path)]
    command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2"]
    command += [sys.executable, "-m", "hvdkit.cli", "bench", "train", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Written to") == 1, "rank 0 alone shall speak"
    names = ("hvdkit", "ddp", "single")
    assert set(index_runs(read_result(path))) == set(itertools.product(names, (1, 2)))
    assert not find_processes_naming(str(tmp_path))


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_convergence_is_that_of_one_process_where_the_batch_is_the_same(tmp_path, framework):
    path = tmp_path / "result.json"
    options = ["--framework", framework, "--task", "digits", "-np", "1,2", "--seeds", "2"]
    options += ["--rules", "linear", "--samples", "7200", "--target", "0.9"]
    done = run_hvdkit("converge", *options, "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(path)
    curves = {
        (one["labels"]["workers"], one["labels"]["batch_rule"], one["metric"]): one
        for one in result["series"]
    }
    for metric in ("accuracy", "samples_seen", "time_s"):
        one, same = curves[1, "fixed", metric], curves[2, "fixed", metric]
        assert one["labels"]["global_batch"] == same["labels"]["global_batch"] == 32
        assert len(one["samples"]) == len(same["samples"]) == 2
        for seed in range(2):
            assert len(one["samples"][seed][0]) == len(same["samples"][seed][0]) == 10
    for seed in range(2):
        one, same = (curves[n, "fixed", "accuracy"]["samples"][seed][0] for n in (1, 2))
        # The sums of a batch are rounded in another order; 360 samples are held out.
        assert same == pytest.approx(one, abs=3 / 360)
        assert one != curves[1, "fixed", "accuracy"]["samples"][1 - seed][0]
    scaled = curves[2, "scaled", "accuracy"]["labels"]
    assert scaled["global_batch"] == 64
    assert scaled["learning_rate"] == pytest.approx(2 * 0.05)
    for run in result["summary"]["runs"]:
        assert (run["seeds"], run["reached"]) == (2, 2)
        assert 720 <= run["samples_to_target"] <= 7200
        assert run["time_to_target_s"] > 0


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


def test_what_suits_the_machine_is_saved_for_the_adapters(tmp_path):
    saved = tmp_path / "settings.json"
    saved.write_text("{")  # what was there before has no say, and is written anew
    options = ["--sizes", "4K,8M", "--rounds", "2", "--candidates", "hvdkit"]
    options += ["--cycle-times", "1,2", "--write-config"]
    done = run_hvdkit("allreduce", *options, HVDKIT_SETTINGS=str(saved))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(saved.read_text())
    assert found["bucket_size_mb"] in {1 << power for power in range(7)}
    assert found["cycle_time_ms"] in (1.0, 2.0)
    assert f"Saved for this machine: {saved}" in done.stdout
    code = """if True:
        import torch
        import hvdkit.torch as hvd
        hvd.init()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1).requires_grad_()], 1))
        import os; print(os.environ["HOROVOD_CYCLE_TIME"])
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HVDKIT_SETTINGS": str(saved)}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert told.stdout.split() == [str(found["cycle_time_ms"])], told.stderr


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
    arguments = ["bench", "train", "-np", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "mlp, hvdkit, 1 worker(s): rank 0 ended with status 1; its last lines" in done.stderr
    assert "this torch is broken" in done.stderr
    assert "Traceback" not in done.stderr.split("its last lines were:")[0]


def test_a_benchmark_that_is_told_to_end_leaves_no_worker(tmp_path):
    code = "from hvdkit.cli import main; main()"
    arguments = ["bench", "train", "--model", "many-small", "-np", "2"]
    driver = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--repeats", "100000"],
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
        (["--model", "mlp,nope"], "models must be distinct names from mlp, many-small, cnn"),
        (["--against", "gloo"], "--against for torch must be distinct names from horovod, ddp"),
        (["-np", "1,two"], "'1,two' is no list of whole numbers, such as 1,2,4"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--expect", "speed>3"], "speed is no metric"),
        (["--expect", "cost_per_million_samples<3"], "needs --price-per-worker-hour"),
        (["--expect", "ratio_to_ddp<=1"], "the goal ratio_to_ddp<=1 needs ddp in --against"),
        (["--output", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json: No such file"),
        (["--output", __file__], "is there already: name another file, or pass --force"),
        (["--output", "/proc/all.json"], "cannot write /proc/all.json"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, message):
    done = run_hvdkit("train", *arguments, timeout_s=30)
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
