"""horovodrun as `hvdkit install` builds it: addresses of hosts, and what a worker is given."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.command import make_environment
from tests.system.loopback import HOSTS, serve

WORKER = Path(__file__).with_name("launched_worker.py")
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
SECRET = "hunter2-of-the-launch-test"
ODD = {
    "HVDKIT_TEST_TOKEN": SECRET,
    "HVDKIT_TEST_QUOTES": 'it\'s a "$HOME" `id` {brace} \\ end',
    "HVDKIT_TEST_LINES": "one\n\ntwo\nEOF\n",
    "HVDKIT_TEST_LONG": "x" * 100_000,
    "HVDKIT_TEST_EMPTY": "",
    "hvdkit.test-name": "no name for a shell",
    "UID": "12345",
    "IFS": "0",
    "HOROVOD_RANK": "7",  # left over from another job
}
GIVEN = {name: value for name, value in ODD.items() if name != "HOROVOD_RANK"}


@pytest.fixture(scope="module")
def loopback(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def start(loopback, folder, hosts, *options, np=2, **variables):
    """Start the worker on hosts; return the process and the file that lets its ranks end."""
    end = folder / "end"
    environment = {
        "PATH": f"{loopback.path}:{make_environment()['PATH']}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    ssh = ["--ssh-port", str(loopback.port), "--ssh-identity-file", str(loopback.identity)]
    command = [HOROVODRUN, "-np", str(np), "--gloo", "--disable-cache", *ssh, *options]
    command += [*hosts, sys.executable, str(WORKER), str(folder), str(end), "it's {an} argument"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=make_environment(**environment),
        stdin=subprocess.PIPE,  # open, and never written to
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return process, end


def finish(process, timeout_s=60):
    """Wait for the end of a job, end it at the deadline; return its exit code and output."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=timeout_s)
        raise AssertionError(f"not done in {timeout_s} s:\n{output}") from None
    return process.returncode, output


def read_results(process, folder, np=2, timeout_s=60):
    """Wait for the files of all ranks; return them, and each command line seen with the secret."""
    seen = []
    deadline = time.monotonic() + timeout_s
    paths = [folder / f"{rank}.json" for rank in range(np)]
    while not all(path.exists() for path in paths):
        assert process.poll() is None, finish(process)[1]
        assert time.monotonic() < deadline, "no results"
        seen += find_command_lines(SECRET)
    seen += find_command_lines(SECRET)
    return [json.loads(path.read_text()) for path in paths], seen


def find_command_lines(text):
    """Return the command lines of this machine's processes that hold a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if text in line else []
    return found


@pytest.mark.parametrize("controlled", [[], ["--network-interfaces", "none0,lo"]])
def test_workers_get_their_environment_and_nobody_else(loopback, tmp_path, controlled):
    hosts = ["-H", f"localhost:1,{HOSTS[0]}:1"]
    folder = tmp_path / "a folder of {mine}"
    folder.mkdir()
    process, end = start(loopback, folder, hosts, *controlled, **ODD)
    try:
        results, seen = read_results(process, folder)
    finally:
        end.touch()
        code, output = finish(process)
    assert code == 0, output
    assert not seen
    for rank, result in enumerate(results):
        environment = result["environment"]
        assert {name: environment.get(name) for name in GIVEN} == GIVEN
        assert environment["HOROVOD_RANK"] == str(rank)
        assert environment.get("HOROVOD_GLOO_IFACE") == (controlled[1] if controlled else None)
        assert result["arguments"] == ["it's {an} argument"]
        assert result["folder"] == str(folder)
        assert result["stdin"] == ""
        assert result["workers"] == 2


def test_an_interface_that_the_launcher_lacks_is_named(loopback, tmp_path):
    hosts = ["-H", f"localhost:1,{HOSTS[0]}:1"]
    process, _ = start(loopback, tmp_path, hosts, "--network-interfaces", "none0,none1")
    code, output = finish(process)
    assert code != 0
    assert "--network-interfaces none0,none1" in output
    assert "lo 127.0.0.1" in output


def test_an_interface_that_a_worker_lacks_is_named(loopback, tmp_path):
    hosts = ["-H", f"localhost:1,{HOSTS[0]}:1"]
    process, _ = start(loopback, tmp_path, hosts, HOROVOD_GLOO_IFACE="none0")
    code, output = finish(process)
    assert code != 0
    assert "HOROVOD_GLOO_IFACE=none0" in output
    assert "lo 127.0.0.1" in output
    assert "HvdkitError" in output


def test_an_elastic_job_may_start_with_one_host(loopback, tmp_path):
    discover = tmp_path / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:1\n")
    discover.chmod(0o755)
    elastic = ["--min-np", "1", "--host-discovery-script", str(discover)]
    process, end = start(loopback, tmp_path, [], *elastic, np=1)
    try:
        (result,), _ = read_results(process, tmp_path, np=1)
    finally:
        end.touch()
        code, output = finish(process)
    assert code == 0, output
    assert result["workers"] == 1


def test_no_worker_stays_on_a_host_when_the_launcher_is_killed(loopback, tmp_path):
    hosts = ["-H", f"{HOSTS[0]}:1,{HOSTS[1]}:1"]
    process, end = start(loopback, tmp_path, hosts)
    try:
        read_results(process, tmp_path)
        process.kill()
        finish(process)
        deadline = time.monotonic() + 30
        while (left := find_command_lines(str(WORKER))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left
    finally:
        end.touch()
