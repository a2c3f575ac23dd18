"""``hvdkit memory`` on real models: what is counted is what the layers come to."""

import pytest

from hvdkit.bench.models import MODELS
from hvdkit.results.files import read_result
from tests.system.command import ROOT, run_hvdkit

MIB = 1 << 20
STATES = {"sgd": 0, "momentum": 1, "adam": 2}
# Outputs of eight layers of 1,024, the input, and little for ten classes.
MLP_ACTIVATIONS = 9 * 1024 * 4


def run(tmp_path, *arguments, code=0):
    path = tmp_path / "memory.json"
    done = run_hvdkit("memory", *arguments, "--output", path, "--force")
    assert done.returncode == code, done.stderr
    return read_result(path)["summary"], done.stdout


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize(("model", "optimizer"), [("mlp", "adam"), ("cnn", "momentum")])
def test_what_is_counted_is_what_the_layers_come_to(tmp_path, framework, model, optimizer):
    arguments = ["--framework", framework, "--model", model, "--optimizer", optimizer]
    summary, output = run(tmp_path, *arguments)
    replica = summary["replica"]
    size = 4 * MODELS[model].parameters
    assert replica["parameters"] == replica["gradients"] == size
    # PyTorch's Adam counts steps for each tensor.
    assert replica["optimizer"] == pytest.approx(STATES[optimizer] * size, rel=1e-4)
    if model == "cnn":  # means and variances of seven layers, and PyTorch's counts of batches
        statistics = 2 * 4 * (32 + 2 * (64 + 128 + 256))
        assert replica["buffers"] - statistics in (0, 7 * 8)
    else:
        expected = MLP_ACTIVATIONS * MODELS["mlp"].batch
        assert replica["activations"] == pytest.approx(expected, rel=0.01)
    assert summary["fits"] is True
    assert "Plain data parallelism shards nothing" in output
    counted = ("parameters", "buffers", "gradients", "optimizer", "reduction")
    assert summary["total_bytes"] > sum(replica[name] for name in counted)


def test_the_frameworks_keep_as_much_of_the_same_layers(tmp_path):
    kept = [
        run(tmp_path, "--framework", name, "--model", "cnn")[0]["replica"]["activations"]
        for name in ("torch", "tensorflow")
    ]
    assert kept[0] == pytest.approx(kept[1], rel=0.05)


def test_the_peak_of_another_batch_is_what_was_said_of_it(tmp_path):
    small, _ = run(tmp_path, "--model", "cnn", "--batch-size", "16")
    large, _ = run(tmp_path, "--model", "cnn", "--batch-size", "64")
    said = {plan["samples"]: plan["total_bytes"] for plan in large["plans"]}
    assert small["total_bytes"] == pytest.approx(said[16], rel=0.03)


def test_what_does_not_fit_is_exit_1_and_says_what_would(tmp_path):
    arguments = ["--model", "cnn", "--batch-size", "64"]
    whole, _ = run(tmp_path, *arguments)
    half = next(plan for plan in whole["plans"] if plan["passes"] == 2)
    room = (half["total_bytes"] + MIB) / (1 << 30)
    summary, output = run(tmp_path, *arguments, "--device-memory-gib", room, code=1)
    assert [plan["fits"] for plan in summary["plans"][:2]] == [False, True]
    assert "does not fit" in output
    assert "as 2 passes of 32 (backward_passes_per_step=2)" in output
    _, output = run(tmp_path, *arguments, "--device-memory-gib", 0.001, code=1)
    assert "No batch fits" in output
    assert "sharding" in output


OWN = """
import torch


def make():
    return torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))


def loss(model, samples):
    return model(torch.ones(samples, 100)).square().mean()


def optimize(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def broken(model, samples):
    raise ValueError("no data today")
"""


def test_a_model_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    names = ["--model", "mine:make", "--optimizer", "mine:optimize", "--batch-size", "4"]
    path = tmp_path / "memory.json"
    where = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = run_hvdkit("memory", *names, "--loss", "mine:loss", "--output", path, **where)
    assert done.returncode == 0, done.stderr
    replica = read_result(path)["summary"]["replica"]
    size = 4 * (100 * 50 + 50 + 50 + 1)
    assert replica["parameters"] == replica["gradients"] == replica["optimizer"] == size
    done = run_hvdkit("memory", *names, "--loss", "mine:broken", **where)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Error: a step of mine:make failed: ValueError: no data today" in done.stderr
    done = run_hvdkit("memory", *names, "--loss", "mine:nothing", **where)
    assert "Error: cannot import mine:nothing" in done.stderr
