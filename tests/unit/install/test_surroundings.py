"""What the doctor says of the machine: real interfaces, programs on a PATH made for the test."""

import pytest

from hvdkit.install.frameworks import Framework
from hvdkit.install.hosts.probe import list_addresses
from hvdkit.install.probe import Probe, probe_libraries
from hvdkit.install.surroundings import examine_surroundings


def find(topic, frameworks=None, probes=None):
    return [f for f in examine_surroundings(frameworks or {}, probes or {}) if f.topic == topic]


def test_loopback_has_its_address():
    assert list_addresses()["lo"] == "127.0.0.1"


def test_every_topic_is_examined():
    topics = [finding.topic for finding in examine_surroundings({}, {})]
    assert set(topics) == {"gpu", "network", "ssh", "shared memory", "threads"}


@pytest.mark.parametrize(
    ("value", "level"),
    [
        *[(value, "ok") for value in ("", "1", "1,2")],
        *[(value, "warning") for value in ("99999", "0", "x")],
    ],
)
def test_threads(monkeypatch, value, level):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    (finding,) = find("threads")
    assert finding.level == level
    assert bool(finding.remedy) is (level == "warning")


def test_no_ssh_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = find("ssh")
    assert (finding.level, finding.remedy) == ("warning", "apt-get install openssh-client")


def test_gpus_that_cpu_builds_or_a_build_without_nccl_leave_idle(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu = Framework("tensorflow", "2.21.0", tmp_path)
    cuda = Framework("torch", "2.13.0+cu130", tmp_path, cuda="13.0")
    frameworks = {"torch": cuda, "tensorflow": cpu}
    without = find("gpu", frameworks, {"torch": Probe({"gloo": True, "nccl": False})})
    assert [finding.level for finding in without] == ["ok", "warning", "warning"]
    assert without[0].text == "1: GPU 0: H200 (UUID: GPU-1)"
    assert without[1].remedy == "hvdkit install --gpu nccl"
    assert "tensorflow 2.21.0 is a CPU build" in without[2].text
    with_nccl = find("gpu", {"torch": cuda}, {"torch": Probe({"gloo": True, "nccl": True})})
    assert [finding.level for finding in with_nccl] == ["ok"]


def test_a_library_that_does_not_load_says_why(tmp_path):
    library = tmp_path / "mpi_lib_v2.so"
    library.write_bytes(b"not a library")
    framework = Framework("torch", "2.13.0", tmp_path)
    probes = probe_libraries({"torch": library}, {"torch": framework})
    assert not probes["torch"].features
    assert "mpi_lib_v2.so" in probes["torch"].error


def test_a_library_whose_framework_is_absent_is_not_loaded(tmp_path):
    assert probe_libraries({"torch": tmp_path / "x.so"}, {}) == {}
