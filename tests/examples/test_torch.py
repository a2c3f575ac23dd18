"""Every PyTorch example runs with tiny arguments, on two workers and on one; none is left out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, launch

EXAMPLES = ROOT / "examples" / "torch"
# Arguments that make an example short, and what its output then holds, once.
TINY = {
    "digits.py": (
        ["--epochs", "4"],
        r"epoch  4  loss 0\.\d+  held-out accuracy 0\.9\d+  \d+ samples/s",
    ),
    "elastic.py": (
        ["--epochs", "4"],
        r"epoch  4  [12] worker\(s\)  rate 0\.\d+  held-out accuracy 0\.9\d+",
    ),
    "resnet50.py": (
        ["--size", "32", "--images", "16", "--batch-size", "4", "--epochs", "1"],
        r"epoch 1  loss \d+\.\d+  accuracy [01]\.\d+  \d+\.\d images/s",
    ),
    "transformer_lm.py": (
        ["--context", "16", "--width", "32", "--layers", "1", "--epochs", "1", "--limit", "128"],
        r"epoch 1  step \d  held out: \d\.\d+ bits a byte  \d+ bytes/s",
    ),
}


def find_runnable():
    """List the files under examples/torch that are made to be run."""
    return {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }


def run_alone(name, *arguments):
    """Run an example as one plain process, as ``python examples/torch/NAME`` does."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_every_runnable_example_has_tiny_arguments():
    assert find_runnable() == set(TINY)


@pytest.mark.parametrize("name", sorted(TINY))
def test_two_workers(name):
    arguments, expected = TINY[name]
    run = launch(EXAMPLES / name, np=2, args=arguments)
    assert run.exit_code == 0, run.explain(f"{name} failed")
    # Rank 0 alone speaks.
    found = re.findall(expected, run.output)
    assert len(found) == 1, run.explain(f"{expected!r} found {len(found)} times")


@pytest.mark.parametrize("name", sorted(TINY))
def test_one_plain_process(name):
    arguments, expected = TINY[name]
    done = run_alone(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(expected, done.stdout)) == 1, done.stdout


@pytest.mark.parametrize("name", sorted(TINY))
def test_help_and_a_mistyped_option(name):
    done = run_alone(name, "--help")
    assert done.returncode == 0, done.stderr
    for option in TINY[name][0][::2]:
        assert option in done.stdout
    done = run_alone(name, "--epoch-count", "3")
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_count_of_zero_is_a_usage_error(name):
    done = run_alone(name, "--batch-size", "0")
    assert done.returncode == 2
    assert "Invalid value for '--batch-size': 0 is not in the range x>=1" in done.stderr


def test_digits_shows_identical_replicas_and_all_workers():
    run = launch(EXAMPLES / "digits.py", args=["--epochs", "1"])
    assert "2 worker(s) on cpu, 1437 training samples" in run.output, run.explain("no start")
    assert "replicas identical: 2 worker(s) hold the same weights" in run.output


def test_more_threads_than_cores_are_named():
    cores = len(os.sched_getaffinity(0))
    run = launch(
        EXAMPLES / "digits.py", args=["--epochs", "1"], env={"OMP_NUM_THREADS": str(cores)}
    )
    assert run.exit_code == 0, run.explain("digits failed")
    expected = f"2 workers with {cores} threads each share {cores} cores"
    assert run.output.count(expected) == 1, run.explain("no warning, or more than one")


def test_the_language_model_goes_on_from_its_checkpoint(tmp_path):
    arguments, _ = TINY["transformer_lm.py"]
    arguments = [*arguments, "--checkpoints", str(tmp_path)]
    # 128 rows, 16 a worker and pass, two passes a step, two workers: two steps an epoch.
    first = launch(EXAMPLES / "transformer_lm.py", args=arguments)
    assert first.exit_code == 0, first.explain("the first run failed")
    arguments[arguments.index("--epochs") + 1] = "2"
    second = launch(EXAMPLES / "transformer_lm.py", args=arguments)
    assert second.exit_code == 0, second.explain("the second run failed")
    assert "resumed at step 2" in second.output, second.explain("it started over")
    assert "epoch 1 " not in second.output
    assert "epoch 2  step 4" in second.output
    third = launch(EXAMPLES / "transformer_lm.py", args=arguments)
    assert third.exit_code == 0, third.explain("the third run failed")
    assert "resumed at step 4" in third.output
    assert "nothing is left to do" in third.output


def write_images(folder: Path):
    """Write two classes of tiny pictures for training and validation."""
    from PIL import Image

    for split, count in (("train", 6), ("validation", 3)):
        for label, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            place = folder / split / label
            place.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (40 + index, 36), colour).save(place / f"{index}.png")


def test_resnet50_reads_a_folder_of_images(tmp_path):
    write_images(tmp_path)
    arguments = ["--folder", str(tmp_path), "--size", "32", "--batch-size", "3"]
    run = launch(EXAMPLES / "resnet50.py", args=arguments)
    assert run.exit_code == 0, run.explain("resnet50 failed")
    assert "2 classes, 12 training images" in run.output


def test_resnet50_says_what_its_folder_lacks(tmp_path):
    arguments = ("--folder", str(tmp_path), "--size", "32")
    for folder in ("validation/blue", "train/blue"):
        (tmp_path / folder).mkdir(parents=True)
        done = run_alone("resnet50.py", *arguments)
        assert done.returncode == 1
        assert done.stderr.strip() == f"Error: found no CLASS/IMAGE in {tmp_path}/train"
