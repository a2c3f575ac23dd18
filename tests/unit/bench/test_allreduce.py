"""What the all-reduce benchmark makes of samples; measuring itself is tested in tests/system."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from hvdkit.bench.allreduce import Settings
from hvdkit.bench.allreduce_summary import (
    fit_cost,
    recommend_bucket_bytes,
    save_settings,
    summarize,
)
from hvdkit.cli import main
from hvdkit.errors import HvdkitError
from hvdkit.settings import Settings as MachineSettings
from hvdkit.settings import read_settings


def test_the_fit_finds_what_the_times_were_made_of():
    points = [(size, 2e-4 + size / 3e9) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)]
    assert fit_cost(points) == pytest.approx((2e-4, 3e9))


def test_small_messages_count_as_much_as_large_ones():
    points = [(1 << 10, 1e-4), (1 << 11, 1e-4), (1 << 30, 1.1)]  # the last is 10 % off 1 GB/s
    latency_s, _ = fit_cost(points)
    assert latency_s == pytest.approx(1e-4, rel=0.1)


def test_a_latency_is_never_negative():
    latency_s, bandwidth = fit_cost([(1 << 20, 1e-3), (1 << 21, 3e-3)])
    assert latency_s == 0.0
    assert bandwidth > 0


def test_times_that_do_not_grow_cannot_be_fitted():
    assert fit_cost([(1 << 10, 2.0), (1 << 11, 1.0)]) is None
    samples = {("hvdkit", "float32", size): [[[1e6 / size]]] for size in (1024, 2048)}
    summary = summarize(samples, 2)
    assert len(summary["messages"]) == 2
    assert summary["fits"] == []
    assert "bucket_size_bytes" not in summary


@pytest.mark.parametrize(
    ("latency_s", "bandwidth", "mib"),
    [(1e-3, 1e9, 16), (0.0, 1e9, 1), (1.0, 1e12, 64), (1e-4, 5e9, 8)],
)
def test_a_bucket_hides_its_latency(latency_s, bandwidth, mib):
    size = recommend_bucket_bytes(latency_s, bandwidth)
    assert size == mib << 20
    if 1 < mib < 64:
        for bytes_, enough in ((size, True), (size // 2, False)):
            share = latency_s / (latency_s + bytes_ / bandwidth)
            assert (share <= 0.1) is enough


def test_bandwidths_are_those_of_nccl_tests():
    # Two rounds of two operations on four ranks; the slowest rank counts.
    rounds = [[[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [1.0, 1.0]], [[4.0, 4.0]] * 4]
    summary = summarize({("torch", "float32", 600): rounds, ("copy", "float32", 600): rounds}, 4)
    ring, copy = summary["messages"]
    assert ring["time_s"] == 3.0  # between 2 and 4
    assert ring["algorithm_bandwidth_bytes_per_s"] == 200
    assert ring["bus_bandwidth_bytes_per_s"] == pytest.approx(200 * 2 * 3 / 4)
    assert copy["bus_bandwidth_bytes_per_s"] == 200
    assert summary["fits"] == []  # one size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes_bytes": ()}, "sizes must be distinct, and at least one"),
        ({"sizes_bytes": (1024, 1024)}, "sizes must be distinct"),
        ({"sizes_bytes": (3,)}, "too small: 1 tensor"),
        ({"sizes_bytes": (1024,), "tensors": 500}, "500 tensor"),
        ({"sizes_bytes": (1024,), "dtypes": ("bfloat16",)}, "dtypes must be distinct names from"),
        ({"sizes_bytes": (1024,), "candidates": ()}, "got none"),
        ({"sizes_bytes": (1024,), "workers": 1}, "at least 2 workers"),
        ({"sizes_bytes": (1024,), "rounds": 0}, "rounds must be at least 1"),
        ({"sizes_bytes": (1024,), "cycle_times_ms": (0.0,)}, "cycle times must be above 0"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(options, message):
    with pytest.raises(HvdkitError, match=message):
        Settings(**options)


def test_a_size_that_is_none_is_refused():
    done = CliRunner().invoke(main, ["bench", "allreduce", "--sizes", "1K,big"])
    assert done.exit_code == 2
    assert "'big' is no size; write 4096, 64K, 8M or 1G" in done.output


def test_the_driver_loads_no_framework():
    code = (
        "import sys, hvdkit.bench.allreduce, hvdkit.cli.bench_allreduce;"
        "print({'torch', 'tensorflow', 'keras', 'horovod', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_best_cycle_time_is_the_one_that_took_least():
    samples = {("hvdkit", "float32", size): [[[1e-3]]] for size in (1024, 2048)}
    # By the sum it would be 0.5 ms: only the larger message counts there.
    for cycle, times in ((0.5, (2e-3, 99e-3)), (1.0, (1e-3, 102e-3)), (2.0, (4e-3, 104e-3))):
        for size, time_s in zip((1024, 2048), times, strict=True):
            samples[f"hvdkit, cycle {cycle:g} ms", "float32", size] = [[[time_s]]]
    assert summarize(samples, 2)["cycle_time_ms"] == 1.0
    assert "cycle_time_ms" not in summarize({("copy", "float32", 1024): [[[1.0]]]}, 2)


def test_what_was_recommended_is_saved_and_the_rest_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_SETTINGS", str(tmp_path / "settings.json"))
    path = save_settings({"bucket_size_bytes": 4 << 20, "cycle_time_ms": 0.5})
    assert path == tmp_path / "settings.json"
    assert read_settings() == MachineSettings(4.0, 0.5)
    save_settings({"bucket_size_bytes": 16 << 20})
    assert read_settings() == MachineSettings(16.0, 0.5)
    with pytest.raises(HvdkitError, match="nothing saved: larger messages did not take longer"):
        save_settings({})
    assert read_settings() == MachineSettings(16.0, 0.5)
    path.write_text("{")
    save_settings({"bucket_size_bytes": 2 << 20})
    assert read_settings() == MachineSettings(2.0, None)
