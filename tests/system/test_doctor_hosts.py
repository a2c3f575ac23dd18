"""`hvdkit doctor --hosts` on loopback hosts; tests/multihost has those with faults."""

import json

import pytest

from hvdkit.install.installed import find_horovod
from tests.system.command import make_environment, run_hvdkit
from tests.system.loopback import HOSTS, serve


@pytest.fixture(scope="module")
def loopback(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def examine(loopback, *options):
    """Run the command; return its exit code and report."""
    ssh = ("--ssh-port", loopback.port, "--ssh-identity-file", loopback.identity)
    path = f"{loopback.path}:{make_environment()['PATH']}"
    done = run_hvdkit("doctor", "--json", *options, *ssh, PATH=path)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.mark.skipif(find_horovod() is None, reason="Horovod is not installed (run: hvdkit install)")
def test_two_hosts_and_the_launcher(loopback):
    names = HOSTS[:2]
    code, report = examine(loopback, "--hosts", ",".join(f"{name}:1" for name in names))
    assert code == 0, report["findings"]
    assert report["healthy"]
    (launcher,) = set(report["hosts"]) - set(names)
    assert launcher.endswith(" (launcher)")
    assert [report["hosts"][name]["slots"] for name in (*names, launcher)] == [1, 1, 0]
    assert report["hosts"][names[0]]["reached"] == {names[1]: "", launcher: ""}
    assert report["hosts"][launcher]["reached"] == {names[0]: "", names[1]: ""}


def test_a_host_that_is_not_there(loopback, tmp_path):
    listed = tmp_path / "hosts"
    listed.write_text("localhost slots=1\nnobody.invalid slots=1\n")
    code, report = examine(loopback, "--hostfile", listed)
    assert code == 1
    faults = [(f["hosts"], f["topic"]) for f in report["findings"] if f["level"] == "fault"]
    assert (["nobody.invalid"], "name") in faults
    assert report["hosts"]["localhost"]["found"]["hostname"]
    assert report["hosts"]["nobody.invalid"]["found"] is None
