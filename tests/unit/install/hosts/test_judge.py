"""What reports of hosts mean: what differs, and what is too much for a host."""

import copy

import pytest

from hvdkit.install.hosts.judge import judge
from hvdkit.install.hosts.listing import HostSlots
from hvdkit.install.hosts.report import HostFinding, HostReport, Launch, merge

DOCTOR = {
    "hvdkit": "1.0",
    "frameworks": {"torch": "2.13.0+cpu"},
    "horovod": "0.28.1",
    "built_against": {"torch": "2.13.0+cpu"},
    "build": {"hvdkit": "1.0", "controllers": ["gloo"], "gpu": None, "edits": ["one", "two"]},
    "findings": [],
}
LAUNCH = Launch("10.0.0.1")


def make_reports(number=3):
    """Return reports of hosts a, b and so on that fit together."""
    names = "abcdef"[:number]
    addresses = {name: f"10.0.0.{place}" for place, name in enumerate(names, 1)}
    reports = []
    for name in names:
        answer = {
            "python": "3.11.2",
            "folder": True,
            "cores": 4,
            "port": 40000,
            "port_error": "",
            "time_s": 1000.0,
            "addresses": {"lo": "127.0.0.1", "eth0": addresses[name]},
            "way": addresses[name],
            "names": dict(addresses),
            "doctor": copy.deepcopy(DOCTOR),
            "doctor_error": "",
        }
        reached = {other: "" for other in names if other != name}
        report = HostReport(HostSlots(name, 4), addresses[name], answer=answer, reached=reached)
        report.asked_s, report.answered_s = 999.0, 1002.0
        reports.append(report)
    return reports


def find(reports, launch=LAUNCH, level=("fault", "warning")):
    """Return (hosts, topic, level, text) of what was found."""
    return [
        ("".join(one.hosts), one.topic, one.level, one.text)
        for one in judge(reports, launch, "/work")
        if one.level in level
    ]


@pytest.mark.parametrize("launch", [LAUNCH, Launch("10.0.0.1", ("ib0", "eth0"))])
def test_hosts_that_fit_together(launch):
    assert not find(make_reports(), launch)
    found = find(make_reports(), launch, level=("ok",))
    assert [one[:2] for one in found] == [("a", "host"), ("b", "host"), ("c", "host")]
    assert "torch 2.13.0, Horovod 0.28.1; eth0 10.0.0.1; 4 cores for 4 worker(s)" in found[0][3]


def test_the_version_that_most_have_is_named_first():
    reports = make_reports()
    reports[0].answer["doctor"]["frameworks"]["torch"] = "2.12.0"
    assert find(reports) == [("a", "torch", "fault", "torch: 2.13.0 on b, c; 2.12.0 on a")]


def test_where_as_many_have_another_version_the_first_host_counts():
    reports = make_reports(2)
    reports[1].answer["doctor"]["hvdkit"] = "1.1"
    assert find(reports) == [("b", "hvdkit", "fault", "hvdkit: 1.0 on a; 1.1 on b")]


def test_a_framework_that_one_host_lacks():
    reports = make_reports(2)
    reports[0].answer["doctor"]["frameworks"] = {}
    assert find(reports) == [("b", "torch", "fault", "torch: none on a; 2.13.0 on b")]


@pytest.mark.parametrize(
    ("part", "value"), [("python", "3.11.9"), ("frameworks", {"torch": "2.13.0+cu130"})]
)
def test_what_may_differ(part, value):
    reports = make_reports(2)
    (reports[1].answer if part == "python" else reports[1].answer["doctor"])[part] = value
    assert not find(reports)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ({}, "not by hvdkit, against torch"),
        ({**DOCTOR["build"], "edits": ["one"]}, "with 1 edits"),
        ({**DOCTOR["build"], "controllers": ["gloo", "mpi"], "mpi": "4.1"}, "gloo, mpi, CPU, MPI"),
        ({**DOCTOR["build"], "gpu": "nccl"}, "gloo, nccl"),
    ],
)
def test_another_build(build, words):
    reports = make_reports()
    reports[1].answer["doctor"]["build"] = build
    ((hosts, topic, level, text),) = find(reports)
    assert (hosts, topic, level) == ("b", "Horovod's build", "fault")
    assert words in text
    assert text.endswith(" on b")


def test_faults_that_a_host_finds_in_itself_are_told_once():
    reports = make_reports()
    small = {"topic": "shared memory", "level": "warning", "text": "64 MiB", "remedy": "more"}
    for report in reports[1:]:
        report.answer["doctor"]["findings"] = [small, {**small, "level": "ok"}]
    assert find(reports) == [("bc", "shared memory", "warning", "64 MiB")]


def test_what_is_too_much_for_a_host():
    reports = make_reports(2)
    reports[0].answer["cores"] = 3
    reports[1].answer.update(port=None, port_error="no", folder=False, time_s=900.0)
    found = {one[:3]: one[3] for one in find(reports)}
    assert found == {
        ("b", "folder", "fault"): "/work is not there: workers would start in the home folder, "
        "without a word",
        ("b", "port", "fault"): "no free port can be listened on: no",
        ("a", "slots", "warning"): "4 workers on 3 cores",
        ("b", "clock", "warning"): "its clock is 99 s from the launcher's",
    }


def test_a_machine_that_only_launches_need_not_have_anything():
    reports = make_reports()
    reports[2].listed = False
    reports[2].answer.update(folder=False, doctor=None, cores=1)
    assert not find(reports)
    reports[2].reached["a"] = "10.0.0.1, port 40000: timed out"
    assert [one[:3] for one in find(reports)] == [("c", "connection", "fault")]
    named = find(make_reports()[:2] + reports[2:], Launch("10.0.0.1", ("ib0",)))
    assert ("abc", "interfaces") not in [one[:2] for one in named]
    assert [one[0] for one in named if one[1] == "interfaces"] == ["a", "b", "c"]
    variable = Launch("10.0.0.1", ("ib0",), "HOROVOD_GLOO_IFACE")
    assert [one[0] for one in find(reports, variable) if one[1] == "interfaces"] == ["a", "b"]


def test_no_way_to_the_launcher():
    reports = make_reports(2)
    reports[1].answer["way"] = None
    assert ("b", "network", "fault", "no way leads to the launcher at 10.0.0.1") in find(reports)


def test_a_failure_leaves_the_other_hosts_to_be_examined():
    reports = make_reports()
    reports[1].answer = None
    reports[1].failure = HostFinding(("b",), "ssh", "fault", "refused")
    reports[2].answer["folder"] = False
    assert [one[:2] for one in find(reports)] == [("b", "ssh"), ("c", "folder")]


def test_merging_keeps_hosts_apart_whose_remedies_differ():
    one = HostFinding(("a",), "x", "ok", "text", "this")
    other = HostFinding(("b",), "x", "fault", "text", "that")
    same = HostFinding(("c",), "x", "ok", "text", "this")
    assert merge([one, other, same]) == [
        other,
        HostFinding(("a", "c"), "x", "ok", "text", "this"),
    ]
