"""`hvdkit doctor` on the Horovod of this environment, as it is and with a framework upgraded."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdkit.install.frameworks import find_frameworks
from hvdkit.install.installed import find_horovod
from tests.system.command import ROOT, run_hvdkit


@pytest.fixture(autouse=True)
def horovod_is_here():
    """Demand a Horovod."""
    if find_horovod() is None:
        if "distributed" in os.environ.get("HVDKIT_REQUIRE", "").split(","):
            pytest.fail("HVDKIT_REQUIRE demands Horovod, which is not installed")
        pytest.skip("Horovod is not installed (run: hvdkit install)")


def run_doctor(**variables):
    """Run `hvdkit doctor --json`; return its exit code and what it reported."""
    done = run_hvdkit("doctor", "--json", **variables)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def find(report, topic, level=None):
    """Return a report's findings about a topic."""
    findings = [f for f in report["findings"] if f["topic"] == topic]
    return [f for f in findings if level is None or f["level"] == level]


def test_this_environment_is_healthy():
    code, report = run_doctor()
    assert [f for f in report["findings"] if f["level"] == "fault"] == []
    assert code == 0
    assert report["healthy"] is True
    versions = {name: framework.version for name, framework in find_frameworks().items()}
    assert report["frameworks"] == versions
    assert report["built_against"] == versions
    assert len(find(report, "fit", "ok")) == len(versions)
    libraries = find(report, "library", "ok")
    assert len(libraries) == len(versions)
    for library in libraries:
        assert "controllers gloo" in library["text"]
    topics = {finding["topic"] for finding in report["findings"]}
    assert {"python", "horovod", "horovodrun", "network", "ssh", "threads"} <= topics


def test_the_table_says_the_same():
    done = run_hvdkit("doctor")
    assert done.returncode == 0, done.stdout
    for framework in find_frameworks().values():
        assert f"built against the {framework.name} that is installed" in done.stdout


def overlay_framework(folder, name, version):
    """Lay a framework of another version in front of the installed one."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / name / "version.py").write_text(f"__version__ = '{version}'\ncuda = None\n")


@pytest.mark.parametrize("name", list(find_frameworks()))
def test_an_upgraded_framework_is_a_fault_that_install_mends(tmp_path, name):
    built = find_frameworks()[name].version
    overlay_framework(tmp_path, name, "99.1.0")
    code, report = run_doctor(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert code == 1
    assert report["healthy"] is False
    (fault,) = find(report, "fit", "fault")
    assert fault["text"] == (f"Horovod was built against {name} {built}, and 99.1.0 is installed")
    assert fault["remedy"] == "hvdkit install"


@pytest.fixture
def bare_packages(tmp_path):
    """Give PYTHONPATH for an interpreter that has what hvdkit needs, and nothing else."""
    for name in ("click", "rich", "markdown_it", "mdurl", "pygments", "hvdkit"):
        origin = Path(find_spec(name).origin).parent
        (tmp_path / name).symlink_to(origin, target_is_directory=True)
    return tmp_path


def run_bare(folder, *arguments):
    """Run a command with only a folder's packages (-S: no site-packages)."""
    script = folder / "run.py"
    script.write_text("from hvdkit.cli import main\nmain(prog_name='hvdkit')\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -S {script} "$@"\n')
    python.chmod(0o755)
    return run_hvdkit(*arguments, python=str(python), PYTHONPATH=folder)


def test_an_environment_with_nothing_in_it(bare_packages):
    done = run_bare(bare_packages, "doctor", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    faults = {f["topic"]: f for f in report["findings"] if f["level"] == "fault"}
    assert set(faults) == {"frameworks", "horovod"}
    assert faults["horovod"]["remedy"] == "hvdkit install"
    assert report["frameworks"] == {}
    assert report["horovod"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("install",), "No framework is installed in this environment"),
        (("check",), "Horovod is not installed in this environment; run: hvdkit install"),
        (
            ("bench", "train"),
            "Horovod is not installed in this environment; run: hvdkit install",
        ),
    ],
)
def test_commands_in_an_environment_with_nothing_in_it(bare_packages, arguments, message):
    done = run_bare(bare_packages, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
