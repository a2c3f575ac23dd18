"""`hvdkit doctor --hosts`: each fault is found before a job starts, on the host that has it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.multihost.job import Job
from tests.multihost.stock import lay_over
from tests.system.command import ROOT
from tests.system.ssh_server import make_key

BOTH = ("--hosts", "hosta:1,hostb:1")


@pytest.fixture
def examine(tmp_path):
    """Give a function that runs the command and returns its exit code and report."""

    def run(network, *options, hosts=BOTH, identity=None, **variables):
        key = ["--ssh-identity-file", str(identity or network.identity)]
        command = [sys.executable, "-m", "hvdkit.cli", "doctor", "--json", *hosts, *key, *options]
        job = Job(network, tmp_path, command, **variables)
        try:
            code = job.finish()
            for host in network.hosts.values():
                assert not host.await_no_process(), host.name
        finally:
            job.end()
        assert job.output.startswith("{"), job.output
        return code, json.loads(job.output)

    return run


@pytest.fixture
def stock(tmp_path):
    """Give the variables that put a Horovod that hvdkit did not build before the installed one."""
    return {"PYTHONPATH": f"{lay_over(tmp_path / 'stock')}{os.pathsep}{ROOT}"}


@contextlib.contextmanager
def hidden(host, path, by=None):
    """Hide a path of one host, behind another file or an empty folder."""
    mount = ["--bind", str(by)] if by else ["-t", "tmpfs", "tmpfs"]
    host.run("mount", *mount, str(path))
    try:
        yield
    finally:
        host.run("umount", str(path))


@contextlib.contextmanager
def refusing(host, *match):
    """Drop what comes to a host and matches."""
    rule = ["INPUT", "-p", "tcp", "--syn", *match, "-j", "DROP"]
    host.run("iptables", "-A", *rule)
    try:
        yield
    finally:
        host.run("iptables", "-D", *rule)


def find(report, level="fault"):
    """Return what was found at a level, as (hosts, topic) to (text, remedy)."""
    return {
        (",".join(one["hosts"]), one["topic"]): (one["text"], one["remedy"])
        for one in report["findings"]
        if one["level"] == level
    }


def test_hosts_that_fit_together(unlike, examine):
    code, report = examine(unlike)
    assert code == 0, report["findings"]
    assert report["healthy"]
    assert not find(report)
    fine = find(report, "ok")
    for name, host in unlike.hosts.items():
        assert f"{host.interface} {host.address}" in fine[name, "host"][0]
        others = set(unlike.hosts) - {name}
        assert report["hosts"][name]["reached"] == dict.fromkeys(others, "")
        assert report["hosts"][name]["found"]["hostname"] == name
    assert "each host chooses its own" in fine["hosta,hostb", "interfaces"][0]
    assert [report["hosts"][name]["local"] for name in unlike.hosts] == [True, False]


def test_other_interface_names_under_another_horovod(unlike, examine, stock):
    code, report = examine(unlike, **stock)
    assert code == 1
    ((hosts, topic), (text, remedy)) = find(report).popitem()
    assert (hosts, topic) == ("hosta,hostb", "interfaces")
    assert "no interface has the same name" in text
    assert "va 10.77.0.1 on hosta; vb 10.77.0.2 on hostb" in text
    assert remedy.startswith("hvdkit install")


def test_loopback_and_unknown_names_under_another_horovod(alike, examine, stock):
    alike["hostb"].set_names({"hostb": "127.0.1.1"})
    try:
        code, report = examine(alike, **stock)
        named_code, named = examine(alike, "--network-interfaces", "eth0", **stock)
        _, built = examine(alike)
    finally:
        alike.know_each_other()
    assert code == named_code == 1
    faults = find(report)
    assert set(faults) == {("hosta,hostb", "interfaces"), ("hostb", "names")}
    text, remedy = faults["hosta,hostb", "interfaces"]
    assert "takes loopback for a network between hosts" in text
    assert remedy.startswith("--network-interfaces eth0")
    assert set(find(named)) == {("hostb", "names")}
    text, remedy = faults["hostb", "names"]
    assert "hosta does not resolve, hostb is 127.0.1.1" in text
    assert "/etc/hosts on hostb" in remedy
    assert not find(built)
    assert "does without" in find(built, "ok")["hostb", "names"][0]


def test_named_interfaces(unlike, examine):
    code, report = examine(unlike, "--network-interfaces", "va,vb")
    assert code == 0, report["findings"]
    code, report = examine(unlike, "--network-interfaces", "va", hosts=("--hosts", "hostb:1"))
    assert code == 1
    text, _ = find(report)["hostb", "interfaces"]
    assert "no interface va" in text
    assert "vb 10.77.0.2" in text


def test_a_name_that_does_not_resolve_on_the_launcher(unlike, examine, tmp_path):
    listed = tmp_path / "hosts.txt"
    listed.write_text("hosta slots=1\nhostz slots=1\n")
    code, report = examine(unlike, hosts=("--hostfile", str(listed)))
    assert code == 1
    ((hosts, topic), (text, remedy)) = find(report).popitem()
    assert (hosts, topic) == ("hostz", "name")
    assert "does not resolve on the launcher" in text
    assert "/etc/hosts" in remedy


def test_ssh_says_why(unlike, examine, tmp_path):
    code, report = examine(unlike, identity=make_key(tmp_path / "other"))
    assert code == 1
    text, remedy = find(report)["hostb", "ssh"]
    assert "Permission denied" in text
    assert "ssh-copy-id hostb" in remedy
    code, report = examine(unlike, "--ssh-port", "2222")
    assert code == 1
    text, remedy = find(report)["hostb", "ssh"]
    assert "Connection refused" in text
    assert "--ssh-port" in remedy


def test_a_host_that_is_down(breakable, examine):
    network = breakable("eth0", "eth0")
    network.cut_off("hostb")
    code, report = examine(network)
    assert code == 1
    text, remedy = find(report)["hostb", "ssh"]
    assert "hostb" in remedy
    assert "timed out" in text or "No route" in text


def test_a_host_that_is_too_slow(unlike, examine):
    code, report = examine(unlike, "--timeout", "0.01")
    assert code == 1
    assert set(find(report)) == {("hosta,hostb", "probe")} or set(find(report)) == {
        ("hosta", "probe"),
        ("hostb", "probe"),
    }


def test_a_firewall_on_one_host(unlike, examine):
    with refusing(unlike["hostb"], "--dport", "1024:65535"):
        code, report = examine(unlike)
    assert code == 1
    ((hosts, topic), (text, remedy)) = find(report).popitem()
    assert (hosts, topic) == ("hosta", "connection")
    assert "does not reach hostb, 10.77.0.2, port" in text
    assert "timed out" in text
    assert "firewall" in remedy


def test_a_firewall_on_a_launcher_that_runs_no_workers(unlike, examine):
    with refusing(unlike["hosta"], "--dport", "1024:65535"):
        code, report = examine(unlike, hosts=("--hosts", "hostb:1"))
    assert code == 1
    ((hosts, topic), (text, _)) = find(report).popitem()
    assert (hosts, topic) == ("hostb", "connection")
    assert "does not reach hosta (launcher), 10.77.0.1, port" in text


def test_a_python_that_a_host_lacks(unlike, examine):
    with hidden(unlike["hostb"], Path(sys.executable).parent):
        code, report = examine(unlike)
    assert code == 1
    text, remedy = find(report)["hostb", "python"]
    assert f"{sys.executable} does not run there" in text
    assert "same path" in remedy


def test_a_folder_and_a_package_that_a_host_lacks(unlike, examine, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with hidden(unlike["hostb"], tmp_path), hidden(unlike["hostb"], ROOT / "hvdkit"):
        code, report = examine(unlike)
    assert code == 1
    faults = find(report)
    assert set(faults) == {("hostb", "folder"), ("hostb", "hvdkit")}
    assert str(tmp_path / "here") in faults["hostb", "folder"][0]
    assert "hvdkit doctor does not run there: " in faults["hostb", "hvdkit"][0]


def test_what_is_another_version(unlike, examine, tmp_path):
    other = tmp_path / "__init__.py"
    other.write_text('"""Another."""\n__version__ = "99.1"\n')
    record = Path(str(metadata.distribution("horovod").locate_file("horovod/hvdkit_build.json")))
    build = json.loads(record.read_text())
    (tmp_path / "build.json").write_text(json.dumps(build | {"edits": build["edits"][1:]}))
    b = unlike["hostb"]
    with hidden(b, ROOT / "hvdkit/__init__.py", other), hidden(b, record, tmp_path / "build.json"):
        code, report = examine(unlike)
    assert code == 1
    faults = find(report)
    assert set(faults) == {("hostb", "hvdkit"), ("hostb", "Horovod's build")}
    assert "99.1 on hostb" in faults["hostb", "hvdkit"][0]
    assert f"{len(build['edits'])} edits" in faults["hostb", "Horovod's build"][0]
    assert f"{len(build['edits']) - 1} edits" in faults["hostb", "Horovod's build"][0]
