"""The benchmark of training: settings, and what samples mean; measuring is in tests/system."""

import subprocess
import sys
from statistics import median

import pytest

from hvdkit.bench.catalog import CANDIDATES, FRAMEWORKS
from hvdkit.bench.models import MODELS
from hvdkit.bench.train import Settings
from hvdkit.bench.train_summary import Measured, summarize
from hvdkit.errors import HvdkitError


def make_measured(candidate, rounds_s, workers=2, model="mlp", spread=0.5, **labels):
    """Rounds of three steps; the last rank is the slowest, and the others take ``spread`` of it."""
    labels = {"batch": 8, "global_batch": 8 * workers, "scaling": "weak", **labels}
    labels |= {"candidate": candidate, "model": model, "workers": workers}
    one = Measured(labels, overhead_s=1e-6)
    for step_s in rounds_s:
        fast, slow = [step_s * spread] * 3, [step_s] * 3
        ranks = [fast] * (workers - 1) + [slow]
        one.add_round([{"samples": {"step_s": rank}} for rank in ranks])
    one.peak_rss_bytes = [10, *[5] * (workers - 1)]
    return one


def find_run(summary, **labels):
    (found,) = (run for run in summary["runs"] if all(run[name] == labels[name] for name in labels))
    return found


def test_throughput_counts_all_workers_over_the_slowest_ranks_time():
    run = find_run(summarize([make_measured("hvdkit", [2.0, 4.0, 2.0], workers=4)]), workers=4)
    assert run["step_time_s"] == 2.0
    assert run["samples_per_s"] == 8 * 4 / 2.0
    assert run["rank_spread"] == pytest.approx(2.0)
    assert run["peak_memory_bytes"] == 10
    assert run["overhead_share"] == pytest.approx(1e-6 / 2.0)
    assert run["scaling_efficiency"] is None
    assert run["cost_per_million_samples"] is None
    # Of nine steps the slowest three take 4 s.
    assert run["step_time_p95_s"] == 4.0


@pytest.mark.parametrize(("scaling", "batch"), [("weak", 8), ("strong", None)])
def test_efficiency_is_throughput_a_worker_over_that_of_the_fewest(scaling, batch):
    measured = []
    for workers, step_s in ((1, 1.0), (2, 1.25), (4, 2.0)):
        local = batch or 32 // workers
        labels = {"scaling": scaling, "batch": local, "global_batch": local * workers}
        measured += [make_measured("hvdkit", [step_s] * 3, workers=workers, **labels)]
    # Another candidate's baseline is its own.
    measured += [make_measured("ddp", [0.5] * 3, workers=1)]
    measured += [make_measured("ddp", [1.0] * 3, workers=2)]
    summary = summarize(measured)
    for workers, step_s in ((2, 1.25), (4, 2.0)):
        run = find_run(summary, candidate="hvdkit", workers=workers)
        grown = workers if scaling == "weak" else 1
        assert run["scaling_efficiency"] == pytest.approx(grown / step_s / workers)
    assert find_run(summary, candidate="ddp", workers=2)["scaling_efficiency"] == 0.5
    assert find_run(summary, candidate="hvdkit", workers=1)["scaling_efficiency"] is None


def test_communication_is_what_single_does_not_do():
    measured = [
        make_measured("hvdkit", [1.25] * 3),
        make_measured("single", [1.0] * 3),
        make_measured("single", [9.0] * 3, model="cnn"),
        make_measured("hvdkit", [1.5] * 3, workers=1),
        make_measured("single", [1.0] * 3, workers=1),
    ]
    summary = summarize(measured)
    run = find_run(summary, candidate="hvdkit", workers=2)
    assert run["communication_share"] == pytest.approx(0.2)
    # One worker has nobody to communicate with.
    assert find_run(summary, candidate="hvdkit", workers=1)["communication_share"] is None


def test_the_cost_is_that_of_all_workers_for_as_long_as_they_take():
    summary = summarize([make_measured("hvdkit", [2.0], workers=4)], price_per_worker_hour=0.9)
    hours = 1e6 / (8 * 4 / 2.0) / 3600
    assert summary["runs"][0]["cost_per_million_samples"] == pytest.approx(0.9 * 4 * hours)


def test_waits_for_input_are_told_apart():
    one = make_measured("hvdkit", [2.0])
    one.samples["input_s"] = [[[0.1] * 3, [0.5] * 3]]
    assert summarize([one])["runs"][0]["input_share"] == pytest.approx(0.25)


def test_ratios_pair_the_rounds():
    rounds = {"hvdkit": [1.0, 4.0, 2.0], "horovod": [2.0, 5.0, 5.0]}
    summary = summarize([make_measured(name, times) for name, times in rounds.items()])
    (ratio,) = summary["ratios"]
    expected = median(a / b for a, b in zip(rounds["hvdkit"], rounds["horovod"], strict=True))
    assert (ratio["candidate"], ratio["reference"]) == ("hvdkit", "horovod")
    assert ratio["estimate"] == pytest.approx(expected)
    assert ratio["low"] <= ratio["estimate"] <= ratio["high"]
    assert summary["geometric_means"] == []


def test_the_mean_over_models_is_geometric():
    measured = []
    for model, own, peer in (("mlp", 1.0, 2.0), ("cnn", 8.0, 4.0)):
        measured += [make_measured("hvdkit", [own], model=model)]
        measured += [make_measured("ddp", [peer], model=model)]
        measured += [make_measured("hvdkit", [9.0], workers=1, model=model)]
    (mean,) = summarize(measured)["geometric_means"]
    assert (mean["workers"], mean["candidate"], mean["reference"]) == (2, "hvdkit", "ddp")
    assert mean["estimate"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("mlp", "alexnet")}, "models must be distinct names from mlp, many-small"),
        ({"models": ()}, "got none"),
        ({"framework": "jax"}, "framework must be distinct names from torch, tensorflow"),
        ({"against": ("mwms",)}, "--against for torch must be distinct names from horovod, ddp"),
        ({"against": ("hvdkit",)}, "--against for torch must be"),
        ({"repeats": 0}, "repeats must be at least 1; got 0"),
        ({"steps": -1}, "steps must be at least 1; got -1"),
        ({"workers": (2, 2)}, "numbers of workers must be distinct"),
        ({"workers": (0,)}, "at least 1"),
        ({"workers": ()}, "at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"batch": 0}, "a batch must be at least 1; got 0"),
        ({"bucket_size_mb": 0.0}, "bucket_size_mb must be a number above 0; got 0"),
        ({"price_per_worker_hour": -1.0}, "price_per_worker_hour must be a number above 0"),
        ({"price_per_worker_hour": float("nan")}, "price_per_worker_hour must be a number"),
        ({"batch": 9, "strong": True}, "a batch of 9 cannot be divided among 2 workers"),
        ({"framework": "tensorflow", "accumulate": 2}, "no accumulation here"),
        ({"framework": "keras", "accumulate": 2, "against": ("mwms",)}, "mwms in keras has no"),
        ({"compression": "bf16", "against": ("horovod",)}, "has no bf16 compression"),
        ({"dtype": "bfloat16", "against": ("horovod",)}, "stock Horovod has no bfloat16"),
        ({"input": "images"}, "--input holds images, and mlp takes vectors"),
        ({"input": "images", "framework": "keras", "models": ("cnn",)}, "fit draws its batches"),
        ({"framework": "tensorflow", "bucket_size_mb": 1, "against": ("mwms",)}, "bucket size"),
        ({"framework": "keras", "compression": "fp16", "against": ("mwms",)}, "cannot compress"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(options, message):
    with pytest.raises(HvdkitError, match=message):
        Settings(**options)


def test_strong_scaling_divides_the_batch():
    settings = Settings(strong=True, batch=64, workers=(1, 2, 4))
    batches = [settings.make_recipes("mlp", workers)[0].batch for workers in settings.workers]
    assert batches == [64, 32, 16]


def test_the_limit_is_always_measured_and_last():
    for against in ((), ("single", "ddp"), ("ddp",)):
        names = [one.candidate for one in Settings(against=against).make_recipes("mlp", 2)]
        assert names[0] == "hvdkit"
        assert names[-1] == "single"
        assert len(set(names)) == len(names)


def test_each_framework_has_candidates():
    assert set(CANDIDATES) == set(FRAMEWORKS)
    for names in CANDIDATES.values():
        assert {"hvdkit", "single"} <= set(names)


@pytest.mark.parametrize("model", MODELS)
def test_a_description_is_whole(model):
    described = MODELS[model]
    assert described.parameters > described.tensors > 0
    assert described.batch > 0
    assert len(described.shape) == (3 if described.kind == "images" else 1)


def test_the_driver_loads_no_framework():
    code = (
        "import sys, hvdkit.bench.train, hvdkit.bench.job, hvdkit.cli.bench_train;"
        "print({'torch', 'tensorflow', 'keras', 'horovod', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
