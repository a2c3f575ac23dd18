"""When there is nothing to do, and what the build's environment holds."""

import dataclasses
import json

import pytest

from hvdkit.install.build import make_environment
from hvdkit.install.steps import is_installed
from hvdkit.install.tools import RUNTIME_REQUIREMENTS
from tests.unit.install.test_installed import TENSORFLOW_LIBRARY, TORCH_LIBRARY, add_built
from tests.unit.install.test_plan import TOOLS, plan_for

PLAN = plan_for()


@pytest.fixture
def installed(site):
    """Everything that the plan asks for."""
    for name in RUNTIME_REQUIREMENTS:
        folder = site / f"{name}-9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    add_built(site, {"key": PLAN.key})
    return site


def test_what_the_plan_would_build_is_there(installed):
    assert is_installed(PLAN)


@pytest.mark.parametrize("file", ["horovod/__init__.py", TORCH_LIBRARY, TENSORFLOW_LIBRARY])
def test_a_lost_file_means_to_install_again(installed, file):
    (installed / file).unlink()
    assert not is_installed(PLAN)


def test_another_build_or_a_missing_import_means_to_install(installed):
    (installed / "horovod/hvdkit_build.json").write_text(json.dumps({"key": "another"}))
    assert not is_installed(PLAN)
    (installed / "horovod/hvdkit_build.json").write_text(json.dumps({"key": PLAN.key}))
    assert is_installed(PLAN)
    (installed / "psutil-9.dist-info/METADATA").unlink()
    (installed / "psutil-9.dist-info").rmdir()
    assert not is_installed(PLAN)


def test_variables_of_the_user_do_not_change_the_build_behind_the_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_WITHOUT_PYTORCH", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    monkeypatch.setenv("MAKEFLAGS", "-j99")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", "/opt/cuda")
    environment = make_environment(PLAN, tmp_path / "tools", tmp_path)
    assert not {"HOROVOD_WITHOUT_PYTORCH", "HOROVOD_GPU_OPERATIONS"} & environment.keys()
    assert environment["HOROVOD_WITH_PYTORCH"] == "1"
    assert environment["MAKEFLAGS"] == "-j8"
    assert environment["HOROVOD_CUDA_HOME"] == "/opt/cuda"
    assert environment["TMPDIR"] == str(tmp_path)


def test_the_compiler_of_the_plan_unless_the_user_named_one(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    assert make_environment(PLAN, tmp_path, tmp_path)["CXX"] == "/usr/bin/g++"
    monkeypatch.setenv("CXX", "ccache g++")
    assert make_environment(PLAN, tmp_path, tmp_path)["CXX"] == "ccache g++"


def test_cmake_is_the_systems_or_that_of_the_private_folder(tmp_path):
    assert make_environment(PLAN, tmp_path, tmp_path)["HOROVOD_CMAKE"] == "/usr/bin/cmake"
    plan = plan_for(tools=dataclasses.replace(TOOLS, cmake=None))
    assert "HOROVOD_CMAKE" not in make_environment(plan, tmp_path, tmp_path)
    own = tmp_path / "cmake/data/bin/cmake"
    own.parent.mkdir(parents=True)
    own.touch()
    assert make_environment(plan, tmp_path, tmp_path)["HOROVOD_CMAKE"] == str(own)
    assert make_environment(plan, tmp_path, tmp_path)["PYTHONPATH"].startswith(str(tmp_path))
