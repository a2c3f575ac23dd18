"""The blocks of code of README.md and CONTRIBUTING.md, executed as their reader would.

What stands before a block is the reader's own: a model, a dataset. Where a block takes long, some
of its numbers are smaller here; that the words exist as they are written is checked besides.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from hvdkit.install.cache import WheelCache, cache_root
from hvdkit.install.plan import Options
from hvdkit.install.steps import draw_plan
from tests.system.command import ROOT
from tests.system.documents import list_files, list_pages, take_block, take_inline
from tests.system.shell import run_commands

WORKERS = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
TWO = "horovodrun -np 2 --gloo python script.py"
TORCH = """
import torch
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randint(0, 3, (128,)))
model = torch.nn.Linear(8, 3)
loss_function = torch.nn.CrossEntropyLoss()
"""
WRAPPED = f"""{TORCH}
import hvdkit.torch as hvd
hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""
SAY = """
print(f"trained: rank {hvd.rank()} of {hvd.size()}")
"""


def find_ranks(printed):
    """Return which ranks said that they had trained, as (rank, size)."""
    said = re.findall(r"trained: rank (\d+) of (\d+)", printed)
    return sorted((int(rank), int(size)) for rank, size in said)


def fill(text, own):
    """Put what is the reader's own in the places that a block leaves open."""
    for place, code in own.items():
        assert text.count(place) == 1, f"{place!r} is not once in:\n{text}"
        text = text.replace(place, code)
    return text


def write_script(folder, *parts, name="script.py"):
    """Write a script of what is the reader's own, and a block."""
    (folder / name).write_text("".join(parts), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Give the path of a project as its reader has it: the files that git has, and no others."""
    folder = tmp_path_factory.mktemp("path") / "hvdkit"
    for name in list_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def test_ci_runs_the_commands_for_a_fresh_machine():
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    block = take_block("README.md", "make demo")
    demo, test = [command.partition("#")[0].strip() for command in block.commands]
    assert demo in lines
    assert test in [line.partition(" REQUIRE=")[0] for line in lines]
    assert take_inline("CONTRIBUTING.md", "make test REQUIRE=browser,elastic") in lines


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Give the bin folder of a fresh environment with all that is here, but Horovod and hvdkit."""
    key = draw_plan(Options(), cache_root()).key
    assert WheelCache(cache_root()).find(key), "no wheel in the cache (run: hvdkit install)"
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    (place,) = (folder / "venv/lib").glob("python*/site-packages")
    others = folder / "others"
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"_*(horovod|hvdkit|editable|pip)", path.name):
            (others / path.name).symlink_to(path)
    (place / "others.pth").write_text(f"{others}\n", encoding="utf-8")
    return folder / "venv/bin"


def test_installing_into_an_environment(environment, project, tmp_path):
    """Only the frameworks are not installed anew, which pip finds in place."""
    own = {"PATH": f"{environment}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": None}
    block = take_block("README.md", "pip install '/path/to/hvdkit[torch]'")
    install, build, doctor = block.commands
    (said,) = run_commands([install], tmp_path, {"/path/to": str(project.parent)}, **own)
    assert "does not provide the extra" not in said
    plan = take_inline("README.md", "hvdkit install --dry-run")
    (planned,) = run_commands([plan], tmp_path, **own)
    assert "in the cache: " in planned
    built, report = run_commands([build, doctor], tmp_path, **own)
    assert "Found in the cache: " in built
    assert "built against the torch that is installed" in report
    where = "import horovod, hvdkit; print(horovod.__file__, hvdkit.__file__)"
    (places,) = run_commands([f'python -c "{where}"'], tmp_path, **own)
    assert [Path(place).is_relative_to(environment.parent) for place in places.split()] == [
        True
    ] * 2
    extras = set()
    for page in list_pages():
        for found in re.findall(r"hvdkit\[([\w,-]+)\]", (ROOT / page).read_text(encoding="utf-8")):
            extras.update(found.split(","))
    (found,) = environment.parent.glob("lib/python*/site-packages/hvdkit-*.dist-info")
    assert extras <= set(metadata.PathDistribution(found).metadata.get_all("Provides-Extra"))


def test_the_one_word_that_changes(tmp_path):
    """That all names are there with the same signatures is tests/distributed/test_surface.py's."""
    block = take_block("README.md", "-import horovod.torch as hvd")
    old, new = (line[1:] for line in block.text.splitlines())
    write_script(tmp_path, f"{old}\nold = hvd\n{new}\nassert hvd is not old and hvd.init\n")
    run_commands(["python script.py"], tmp_path)


def test_the_quick_start_trains_on_one_worker_and_on_several(tmp_path):
    block = take_block("README.md", "import torch\nimport hvdkit.torch as hvd")
    write_script(tmp_path, TORCH, block.text, SAY)
    one = take_inline("README.md", "python script.py")
    several = take_inline("README.md", "horovodrun -np 4 --gloo python script.py")
    alone, together = run_commands([one, several], tmp_path, {"-np 4": "-np 2"}, **WORKERS)
    assert find_ranks(alone) == [(0, 1)]
    assert find_ranks(together) == [(0, 2), (1, 2)]


def test_the_quick_start_of_keras_trains_on_tensorflow(tmp_path):
    block = take_block("README.md", "import keras\nimport hvdkit.keras as hvd")
    data = """
import numpy
inputs, targets = numpy.random.rand(128, 8), numpy.random.randint(3, size=128)
"""
    model = 'keras.Sequential([keras.Input([8]), keras.layers.Dense(3, "softmax")])'
    own = {
        "model = ...": f"model = {model}",
        "loss=...": 'loss="sparse_categorical_crossentropy"',
    }
    write_script(tmp_path, data, fill(block.text, own), SAY)
    (printed,) = run_commands([TWO], tmp_path, **WORKERS)
    assert find_ranks(printed) == [(0, 2), (1, 2)]
    assert len(re.findall(r"accuracy: \d", printed)) == 1  # rank_zero(2): one line, by one rank


def test_the_error_of_a_lost_rank_reads_as_it_is_shown(tmp_path):
    shown = take_block("README.md", "Horovod has been shut down").text
    dying = """
import os
def loss_function(outputs, targets, steps=[]):
    steps.append(outputs)
    if hvd.rank() == 1 and len(steps) == 8:
        os._exit(1)
    return torch.nn.functional.cross_entropy(outputs, targets)
"""
    training = take_block("README.md", "import torch\nimport hvdkit.torch as hvd").text
    write_script(tmp_path, TORCH, dying, training)
    (printed,) = run_commands([TWO], tmp_path, codes=range(1, 256), **WORKERS)
    expected = " ".join(shown.split()).partition(" (")[0]  # then the words of the connection
    assert expected in " ".join(printed.split()), printed[-6000:]


def test_training_that_checks_itself_goes_on_where_it_was(tmp_path):
    block = take_block("README.md", 'store = hvd.CheckpointStore("checkpoints"')
    batches = (
        "import os\nbatches = [dataset[:32]] * (1 if os.path.exists('checkpoints') else 1001)\n"
    )
    say = 'print("first step:", restored["step"] if restored else 0)\n'
    write_script(tmp_path, WRAPPED, batches, block.text, say, SAY)
    first, second = run_commands([TWO] * 2, tmp_path, **WORKERS)
    for printed, step in ((first, 0), (second, 1000)):
        assert find_ranks(printed) == [(0, 2), (1, 2)]
        assert re.findall(r"first step: (\d+)", printed) == [str(step)] * 2


def test_elastic_training_starts_as_it_is_said(tmp_path):
    block = take_block("README.md", "state = hvd.elastic.TorchState(")
    own = "schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)\n"
    step = (
        "optimizer.zero_grad(); loss_function(model(inputs), targets).backward(); optimizer.step()"
    )
    training = fill(block.text, {"...  # one training step": step})
    write_script(tmp_path, WRAPPED, own, training, SAY, name="train.py")
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n", encoding="utf-8")
    hosts.chmod(0o755)
    start = take_inline(
        "README.md",
        "horovodrun -np 2 --min-np 1 --max-np 8 --host-discovery-script ./hosts.sh python train.py",
    )
    (printed,) = run_commands([start], tmp_path, **WORKERS)
    assert find_ranks(printed) == [(0, 2), (1, 2)]


def test_results_are_compared_extrapolated_and_shown(tmp_path):
    """A goal may be missed on a busy machine, and a result be worse: both are an exit code of 1."""
    block = take_block("README.md", "hvdkit bench train --model resnet50")
    small = {"--model resnet50": "--model many-small --batch-size 1 --repeats 5 --steps 2"}
    measure, again, compare = block.commands
    run_commands([measure], tmp_path, small, codes=(0, 1), **WORKERS)
    run_commands([again], tmp_path, small, **WORKERS)
    (compared,) = run_commands([compare], tmp_path, codes=(0, 1))
    assert "candidate hvdkit, workers 2" in compared
    block = take_block("README.md", "hvdkit bench allreduce -np 2")
    small = {"bench allreduce": "bench allreduce --sizes 16K,1M --rounds 2"}
    _, predicted, _ = run_commands(block.commands, tmp_path, small, **WORKERS)
    assert "64" in predicted
    assert "<svg" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_contributors_run(project):
    """In a repository of its own, with the environment of these tests as its ``.venv``."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("these tests run in no virtual environment (make test makes one)")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True, timeout=60)
    (project / ".venv").symlink_to(sys.prefix)
    hook = take_inline("CONTRIBUTING.md", "source .venv/bin/activate && pre-commit install")
    test = take_inline("CONTRIBUTING.md", ".venv/bin/python -m pytest tests/unit/test_buckets.py")
    _, tested = run_commands([hook, test], project, PYTHONPATH=None)
    assert (project / ".git/hooks/pre-commit").is_file()
    assert re.search(r"\d+ passed", tested)
