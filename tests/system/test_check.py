"""`hvdkit check`: real workers, wrong results, deadlines, bad input."""

import os
import subprocess
import sys

import pytest

from hvdkit.install.check_worker import CHECKS
from hvdkit.install.frameworks import find_frameworks
from hvdkit.install.installed import find_horovod
from hvdkit.install.prove import judge
from tests.system.command import ROOT, find_processes_naming, make_environment, run_hvdkit


@pytest.fixture(autouse=True)
def horovod_is_here():
    """Demand a Horovod that serves a framework."""
    horovod = find_horovod()
    if horovod is None or not set(horovod.libraries) & set(find_frameworks()):
        if "distributed" in os.environ.get("HVDKIT_REQUIRE", "").split(","):
            pytest.fail("HVDKIT_REQUIRE demands Horovod, which is not installed")
        pytest.skip("Horovod is not installed (run: hvdkit install)")


def test_every_framework_passes_every_check():
    done = run_hvdkit("check")
    assert done.returncode == 0, done.stdout + done.stderr
    names = list(find_horovod().libraries)
    for name in names:
        assert f"Checking {name} with 2 workers" in done.stdout
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    for check in ("world size", *CHECKS):
        assert rows[check].count(" ok ") == len(names), rows[check]


WRONG = """
import sys
import horovod.torch as hvd
from hvdkit.install import check_worker

right = hvd.allreduce

def wrong(tensor, **options):
    result = right(tensor, **options)
    return result + 1 if hvd.rank() == 1 and tensor.numel() > 2 else result

hvd.allreduce = wrong
sys.exit(check_worker.main())
"""


def test_wrong_values_on_one_rank_are_found_there(tmp_path):
    if "torch" not in find_horovod().libraries:
        pytest.skip("Horovod is built without PyTorch")
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    launch = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--gloo"]
    done = subprocess.run(
        [*launch, sys.executable, str(script), "torch", "--size", "2"],
        cwd=tmp_path,
        env=make_environment(OMP_NUM_THREADS=1),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    proof = judge("torch", 2, done.stdout.splitlines(), "")
    failed = {outcome.name for outcome in proof.outcomes if outcome.errors}
    sums = {name for name in CHECKS if name.startswith("allreduce sum")}
    assert failed == sums | {"allreduce average"}
    for outcome in proof.outcomes:
        assert set(outcome.errors) <= {1}
        assert not outcome.errors or "expected" in outcome.errors[1]


def test_a_deadline_ends_every_worker():
    done = run_hvdkit("check", "--deadline", "0.5")
    assert done.returncode == 1
    assert "no end within 0.5 s; the workers were stopped" in done.stdout
    assert find_processes_naming("hvdkit.install.check_worker") == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--np", "0"), 2, "0 is not in the range x>=1"),
        (("--np", "two"), 2, "not a valid integer"),
        (("--frameworks", "mxnet"), 1, "was not built for 'mxnet'"),
        (("--controller", "smoke"), 2, "smoke"),
        (("--frameworks", ""), 1, "--frameworks is empty"),
        (("--deadline", "0"), 2, "0.0 is not in the range"),
        (("stray",), 2, "'stray' is no option of horovodrun"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, code, message):
    done = run_hvdkit("check", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_controller_that_is_not_built_in_is_said_without_workers():
    if "mpi" in find_horovod().record["controllers"]:
        pytest.skip("this Horovod has both controllers")
    done = run_hvdkit("check", "--controller", "mpi")
    assert done.returncode == 1
    assert "built without MPI; run: hvdkit install --with-mpi" in done.stderr
    assert done.stdout == ""


def test_a_horovodrun_that_fails_is_a_failure_with_its_last_lines():
    done = run_hvdkit("check", "--hosts", "localhost:1")
    assert done.returncode == 1
    assert "horovodrun exited with code" in done.stdout
    assert str(ROOT) not in done.stderr
