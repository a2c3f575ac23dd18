"""The benchmark's settings and comparisons; measuring itself is tested in tests/system."""

import subprocess
import sys
from statistics import median

import pytest

from hvdkit.bench.catalog import CANDIDATES, FRAMEWORKS, MODELS
from hvdkit.bench.optimizer import Settings, compare_candidates
from hvdkit.errors import HvdkitError


def _make_model(step_s):
    """A model's result from one list of round medians a candidate; two ranks, three steps."""
    return {
        "candidates": {
            name: {"step_s": [[[one / 2] * 3, [one, one, 2 * one]] for one in rounds]}
            for name, rounds in step_s.items()
        }
    }


def test_ratios_pair_the_rounds_and_follow_the_slowest_rank():
    rounds = {"hvdkit": [1.0, 4.0, 2.0], "horovod": [2.0, 5.0, 5.0]}
    pairs = compare_candidates({"mlp": _make_model(rounds)})
    assert [(pair["candidate"], pair["reference"]) for pair in pairs] == [("hvdkit", "horovod")]
    expected = median(a / b for a, b in zip(rounds["hvdkit"], rounds["horovod"], strict=True))
    assert pairs[0]["models"]["mlp"]["estimate"] == pytest.approx(expected)
    assert pairs[0]["geometric_mean"]["estimate"] == pytest.approx(expected)


def test_the_mean_over_models_is_geometric():
    models = {
        "mlp": _make_model({"hvdkit": [1.0, 1.0], "ddp": [2.0, 2.0], "single": [0.5, 0.5]}),
        "cnn": _make_model({"hvdkit": [8.0, 8.0], "ddp": [4.0, 4.0], "single": [4.0, 4.0]}),
    }
    pairs = {(p["candidate"], p["reference"]): p for p in compare_candidates(models)}
    assert list(pairs) == [("hvdkit", "ddp"), ("hvdkit", "single"), ("ddp", "single")]
    assert pairs["hvdkit", "ddp"]["geometric_mean"]["estimate"] == pytest.approx(1.0)
    assert pairs["hvdkit", "single"]["geometric_mean"]["estimate"] == pytest.approx(2.0)
    assert pairs["ddp", "single"]["models"]["mlp"]["estimate"] == pytest.approx(4.0)


def test_one_candidate_alone_has_nothing_to_be_compared_with():
    assert compare_candidates({"mlp": _make_model({"hvdkit": [1.0]})}) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("models", ("mlp", "resnet"), "models must be distinct names from mlp, many-small, cnn"),
        ("models", (), "got none"),
        ("framework", "jax", "framework must be one of torch, tensorflow, keras; got jax"),
        ("candidates", ("ddp", "ddp"), "candidates must be distinct"),
        ("rounds", 0, "rounds must be at least 1; got 0"),
        ("steps", -1, "steps must be at least 1; got -1"),
        ("workers", 0, "workers must be at least 1"),
        ("threads", 0, "threads must be at least 1"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(field, value, message):
    with pytest.raises(HvdkitError, match=message):
        Settings(**{field: value})


def test_the_defaults_measure_everything():
    assert Settings().models == MODELS
    assert Settings().candidates == CANDIDATES["torch"]
    assert set(CANDIDATES) == set(FRAMEWORKS)


def test_the_driver_loads_no_framework():
    code = (
        "import sys, hvdkit.bench.optimizer, hvdkit.cli.bench_optimizer;"
        "print({'torch', 'tensorflow', 'keras', 'horovod', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
