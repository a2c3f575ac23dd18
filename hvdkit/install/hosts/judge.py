"""What the reports of all hosts mean: what is wrong on each, and what to change."""

from collections.abc import Iterator, Sequence

from hvdkit.install.hosts.report import HostFinding, HostReport, Launch, merge
from hvdkit.install.hosts.sameness import compare_environments, describe_environment
from hvdkit.install.hosts.ways import judge_interfaces, judge_names, judge_ways

__all__ = ["judge"]

MAX_CLOCK_S = 60.0


def judge(reports: Sequence[HostReport], launch: Launch, folder: str) -> list[HostFinding]:
    """Return what was found, faults first.

    Args:
        reports: One a host, and one of the launcher's machine where it is not among them.
        launch: How horovodrun would start the job.
        folder: The launcher's working folder.
    """
    found = [finding for report in reports for finding in _judge_host(report, folder)]
    answered = [report for report in reports if report.answer is not None]
    workers = [report for report in answered if report.listed]
    found += compare_environments(workers)
    found += judge_interfaces(answered, launch)
    found += judge_names(workers, launch)
    found += judge_ways(answered, launch)
    troubled = {host for finding in found if finding.level == "fault" for host in finding.hosts}
    for report in workers:
        if report.name not in troubled:
            found.append(_describe(report, launch))
    return merge(found)


def _judge_host(report: HostReport, folder: str) -> Iterator[HostFinding]:
    hosts = (report.name,)
    if report.failure is not None:
        yield report.failure
    answer = report.answer
    if answer is None or not report.listed:
        return
    if not answer["folder"]:
        yield HostFinding(
            hosts,
            "folder",
            "fault",
            f"{folder} is not there: workers would start in the home folder, without a word",
            "start the job from a folder that every host has, for example a shared one",
        )
    if answer["port"] is None:
        text = f"no free port can be listened on: {answer['port_error']}"
        yield HostFinding(hosts, "port", "fault", text, "see the limits of sockets there")
    if report.host.slots > answer["cores"]:
        text = f"{report.host.slots} workers on {answer['cores']} cores"
        yield HostFinding(hosts, "slots", "warning", text, "fewer slots, unless each has a GPU")
    ahead_s = max(report.asked_s - answer["time_s"], answer["time_s"] - report.answered_s, 0.0)
    if ahead_s > MAX_CLOCK_S:
        text = f"its clock is {ahead_s:.0f} s from the launcher's"
        yield HostFinding(hosts, "clock", "warning", text, "run an NTP client on both")
    if answer["doctor"] is None:
        yield HostFinding(
            hosts,
            "hvdkit",
            "fault",
            f"hvdkit doctor does not run there: {answer['doctor_error']}",
            "install hvdkit there, or the same environment as here",
        )
        return
    for one in answer["doctor"].get("findings", []):
        if one["level"] != "ok":
            yield HostFinding(hosts, one["topic"], one["level"], one["text"], one["remedy"])


def _describe(report: HostReport, launch: Launch) -> HostFinding:
    assert report.answer is not None
    address = launch.choose_address(report.answer)
    interface = [name for name, one in report.answer["addresses"].items() if one == address]
    text = (
        f"{describe_environment(report)}; {' '.join([*interface, str(address)])}; "
        f"{report.answer['cores']} cores for {report.host.slots} worker(s)"
    )
    return HostFinding((report.name,), "host", "ok", text)
