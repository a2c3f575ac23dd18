"""Reading an installed Horovod and judging its fit, on distributions laid out on disk."""

import json
from pathlib import Path

import pytest

from hvdkit.install.doctor import examine_fit, examine_horovod
from hvdkit.install.frameworks import Framework
from hvdkit.install.installed import find_horovod

TORCH_LIBRARY = "horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so"
TENSORFLOW_LIBRARY = "horovod/tensorflow/mpi_lib.cpython-311-x86_64-linux-gnu.so"
RECORD = {
    "hvdkit": "0.1.0",
    "key": "k1",
    "frameworks": {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"},
    "controllers": ["gloo"],
}


def add_horovod(site, files):
    folder = site / "horovod-0.28.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (folder / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    for name, content in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def add_built(site, record=RECORD, libraries=(TORCH_LIBRARY, TENSORFLOW_LIBRARY)):
    files = {"horovod/__init__.py": "", **dict.fromkeys(libraries, "")}
    add_horovod(site, {**files, "horovod/hvdkit_build.json": json.dumps(record)})


def framework(name, version):
    return Framework(name, version, Path("/site") / name)


def levels(findings):
    return [(finding.level, finding.text) for finding in findings if finding.level != "ok"]


def test_none(site):
    assert find_horovod() is None
    ((level, text),) = levels(examine_horovod(None))
    assert (level, text) == ("fault", "not installed in this environment")


def test_built_by_hvdkit(site):
    add_built(site)
    horovod = find_horovod()
    assert horovod.version == "0.28.1"
    assert horovod.libraries == {
        "torch": site / TORCH_LIBRARY,
        "tensorflow": site / TENSORFLOW_LIBRARY,
    }
    assert horovod.record == RECORD
    assert horovod.built_against == RECORD["frameworks"]
    assert horovod.lost == ()


def test_built_otherwise(site):
    versions = {"pytorch": "2.13.0+cpu", "dummy": "none"}
    files = {TORCH_LIBRARY: "", "horovod/metadata.json": json.dumps(versions)}
    add_horovod(site, files)
    horovod = find_horovod()
    assert horovod.built_against == {"torch": "2.13.0+cpu"}
    ((level, text),) = [
        found for found in levels(examine_horovod(horovod)) if "imports" not in found[1]
    ]
    assert level == "warning"
    assert "not by hvdkit" in text


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_record_that_cannot_be_read_is_none(site, content):
    add_horovod(site, {TORCH_LIBRARY: "", "horovod/hvdkit_build.json": content})
    assert find_horovod().record == {}


def test_lost_files_are_a_fault(site):
    add_built(site)
    (site / "horovod/__init__.py").unlink()
    horovod = find_horovod()
    assert horovod.lost == ("horovod/__init__.py",)
    faults = [f for f in examine_horovod(horovod) if f.level == "fault" and "gone" in f.text]
    assert [fault.remedy for fault in faults] == ["hvdkit install"]


def test_a_lost_launcher_is_a_lost_file(site):
    add_horovod(site, {TORCH_LIBRARY: "", "../bin/horovodrun": ""})
    assert find_horovod().lost == ()
    (site.parent / "bin/horovodrun").unlink()
    assert find_horovod().lost == ("../bin/horovodrun",)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}, []),
        (
            {"torch": "2.13.1+cpu", "tensorflow": "2.21.0"},
            [
                (
                    "fault",
                    "Horovod was built against torch 2.13.0+cpu, and 2.13.1+cpu is installed",
                )
            ],
        ),
        # A CPU and a CUDA build of one release have other libraries.
        (
            {"torch": "2.13.0+cu130", "tensorflow": "2.21.0"},
            [
                (
                    "fault",
                    "Horovod was built against torch 2.13.0+cpu, and 2.13.0+cu130 is installed",
                )
            ],
        ),
        (
            {"torch": "2.13.0+cpu"},
            [("warning", "Horovod was built for tensorflow, which is not installed")],
        ),
    ],
)
def test_fit(site, versions, expected):
    add_built(site)
    installed = {name: framework(name, version) for name, version in versions.items()}
    findings = list(examine_fit(find_horovod(), installed))
    assert levels(findings) == expected
    for finding in findings:
        assert bool(finding.remedy) is (finding.level != "ok")
        if finding.level == "fault":
            assert finding.remedy == "hvdkit install"


def test_a_framework_that_horovod_was_not_built_for(site):
    add_built(site, {**RECORD, "frameworks": {"torch": "2.13.0+cpu"}}, (TORCH_LIBRARY,))
    installed = {
        "torch": framework("torch", "2.13.0+cpu"),
        "tensorflow": framework("tensorflow", "2.21.0"),
    }
    assert levels(examine_fit(find_horovod(), installed)) == [
        ("warning", "Horovod was not built for tensorflow")
    ]
