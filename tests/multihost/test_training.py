"""Training across hosts by horovodrun, whatever their interfaces and names; and losing one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.multihost.job import HOROVODRUN, Job, list_command_lines
from tests.system.ssh_server import write_client

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCH = [str(EXAMPLES / "torch/digits.py"), "--epochs", "2"]
KERAS = [str(EXAMPLES / "tensorflow/digits_keras.py"), "--epochs", "2"]
EQUAL = "replicas identical: 2 worker(s) hold the same weights"
ENDLESS = [*TORCH[:1], "--epochs", "100000"]
SECRET = "hunter2-of-the-hosts"


def train(network, folder, script, options=(), **variables):
    """Train to a good end, with equal replicas and no process left on a host."""
    job = Job.train(network, folder, script, options, **variables)
    try:
        code = job.finish()
        assert code == 0, job.explain(f"exit code {code}")
        assert EQUAL in job.output, job.explain("replicas were not compared")
        for host in network.hosts.values():
            assert not host.await_no_process(), host.name
    finally:
        job.end()


@pytest.mark.parametrize("script", [TORCH, KERAS], ids=["torch", "tensorflow"])
@pytest.mark.parametrize("kind", ["alike", "unlike"])
def test_hosts_choose_their_addresses(request, kind, script, tmp_path):
    train(request.getfixturevalue(kind), tmp_path, script)


@pytest.mark.parametrize(("kind", "names"), [("alike", "eth0"), ("unlike", "va,vb")])
def test_named_interfaces(request, kind, names, tmp_path):
    train(request.getfixturevalue(kind), tmp_path, TORCH, ["--network-interfaces", names])


def test_names_that_the_launcher_alone_knows(unlike, tmp_path):
    unlike["hostb"].set_names({})
    try:
        train(unlike, tmp_path, TORCH)
    finally:
        unlike.know_each_other()


def test_own_names_that_stand_for_loopback(alike, tmp_path):
    a, b = alike["hosta"], alike["hostb"]
    a.set_names({a.name: "127.0.1.1", b.name: b.address})  # as Debian's installer writes it
    b.set_names({b.name: "127.0.1.1", a.name: a.address})
    try:
        train(alike, tmp_path, TORCH)
    finally:
        alike.know_each_other()


def test_check_across_hosts(unlike, tmp_path):
    command = [sys.executable, "-m", "hvdkit.cli", "check", "--hosts", "hosta:1,hostb:1"]
    options = ["--ssh-identity-file", str(unlike.identity), "--disable-cache"]
    job = Job(unlike, tmp_path, [*command, "--", *options])
    try:
        assert job.finish() == 0, job.explain("it failed")
    finally:
        job.end()


def test_the_environment_is_on_no_command_line(alike, tmp_path):
    job = Job.train(alike, tmp_path, ENDLESS, HVDKIT_TEST_TOKEN=SECRET)
    lines = []
    try:
        deadline = time.monotonic() + 60
        while "epoch  2" not in job.output:
            assert job.running, job.explain("it ended")
            assert time.monotonic() < deadline, job.explain("no second epoch")
            lines += [line for host in alike.hosts.values() for line in list_command_lines(host)]
        holders = {
            host.name
            for host in alike.hosts.values()
            for process in host.list_processes()
            if read_variable(process, "HVDKIT_TEST_TOKEN") == SECRET
            and "digits.py" in " ".join(process.cmdline())
        }
    finally:
        job.end()
    assert holders == {"hosta", "hostb"}
    assert any("digits.py" in line for line in lines)
    assert not [line for line in lines if SECRET in line]


def read_variable(process, name):
    """Return a variable of a process, or None."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name)
    return None


def test_a_host_that_is_cut_off_ends_the_job(breakable, tmp_path):
    network = breakable("va", "vb")
    job = Job.train(network, tmp_path, ENDLESS, HOROVOD_GLOO_TIMEOUT_SECONDS="5")
    try:
        job.wait_for("epoch  2")
        network.cut_off("hostb")
        assert job.finish() != 0
        assert "rank 1 does not answer" in job.output, job.explain("nobody is named")
        for host in network.hosts.values():
            assert not host.await_no_process(30), host.name
    finally:
        job.end()


def test_an_elastic_job_goes_on_without_a_host_that_is_cut_off(breakable, tmp_path):
    network = breakable("va", "vb", "vc")
    discover = tmp_path / "discover.sh"
    discover.write_text("#!/bin/sh\nprintf 'hosta:1\\nhostb:1\\nhostc:1\\n'\n")
    discover.chmod(0o755)
    elastic = ["--min-np", "1", "--max-np", "3", "--host-discovery-script", str(discover)]
    command = [HOROVODRUN, "-np", "3", "--gloo", "--disable-cache", *elastic]
    command += ["--ssh-identity-file", str(network.identity), sys.executable]
    command += [str(EXAMPLES / "torch/elastic.py"), "--epochs", "60"]
    # Until ssh ends, horovodrun waits for the worker behind it: as in a user's ~/.ssh/config.
    notice = ["-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2"]
    write_client(tmp_path / "bin", notice)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job = Job(network, tmp_path, command, HOROVOD_GLOO_TIMEOUT_SECONDS="5", PATH=path)
    try:
        job.wait_for("epoch  2  3 worker(s)")
        network.cut_off("hostb")
        job.wait_for("2 worker(s), from step", timeout_s=90)
        assert job.finish() == 0, job.explain("the job did not survive")
        assert "epoch 60  2 worker(s)" in job.output, job.explain("not all epochs")
        assert not network["hosta"].await_no_process()
        assert not network["hostc"].await_no_process()
        network.connect("hostb")  # only now can its worker be told
        assert not network["hostb"].await_no_process(60)
    finally:
        job.end()
