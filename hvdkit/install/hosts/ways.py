"""Ways between hosts: their interfaces, their names, and the connections that were tried."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdkit.install.hosts.report import HostFinding, HostReport, Launch

__all__ = ["judge_interfaces", "judge_names", "judge_ways"]


def judge_interfaces(reports: Sequence[HostReport], launch: Launch) -> Iterator[HostFinding]:
    """Say which interface each host takes, and whether Horovod can do with that."""
    if launch.interfaces:
        for report in reports:
            if report.listed or launch.named_by == "--network-interfaces":
                yield from _judge_named(report, launch)
        return
    workers = [report for report in reports if report.listed]
    names = tuple(report.name for report in workers)
    own = {report.name: _list_outer(report.answer or {}) for report in workers}
    described = "; ".join(
        f"{_describe(addresses) or 'none'} on {name}" for name, addresses in own.items()
    )
    if len(workers) < 2:
        return
    first, *others = own.values()
    common = [name for name in first if all(name in addresses for addresses in others)]
    if launch.choosing:
        if not common and all(own.values()):
            text = f"other names: {described}; each host chooses its own"
            yield HostFinding(names, "interfaces", "ok", text)
    elif common:
        text = (
            f"this Horovod, not built by hvdkit, takes loopback for a network between hosts; they "
            f"have {described}"
        )
        remedy = f"--network-interfaces {common[0]}; or hvdkit install, whose Horovod needs none"
        yield HostFinding(names, "interfaces", "fault", text, remedy)
    else:
        text = (
            f"no interface has the same name on all hosts, which this Horovod, not built by "
            f"hvdkit, demands: {described}"
        )
        remedy = "hvdkit install: with its Horovod each host chooses its own; or rename them"
        yield HostFinding(names, "interfaces", "fault", text, remedy)


def _judge_named(report: HostReport, launch: Launch) -> Iterator[HostFinding]:
    assert report.answer is not None
    has = report.answer["addresses"]
    lacking = [name for name in launch.interfaces if name not in has]
    if not lacking or (launch.choosing and len(lacking) < len(launch.interfaces)):
        return
    text = f"no interface {' or '.join(lacking)} with an IPv4 address; it has {_describe(has)}"
    remedy = f"{launch.named_by} with one of each host, or without it: then each chooses its own"
    if not launch.choosing:
        remedy = "hvdkit install: with its Horovod each host chooses its own interface"
    yield HostFinding((report.name,), "interfaces", "fault", text, remedy)


def judge_names(reports: Sequence[HostReport], launch: Launch) -> Iterator[HostFinding]:
    """Say which names do not lead to a host from another one."""
    for report in reports:
        assert report.answer is not None
        wrong = []
        for other in reports:
            address = report.answer["names"].get(other.name)
            if address is None:
                wrong.append(f"{other.name} does not resolve")
            elif address.startswith("127.") and address != other.address:
                wrong.append(f"{other.name} is {address}")
        if not wrong:
            continue
        text = f"there, {', '.join(wrong)}"
        if launch.choosing:
            # Workers are told addresses, so this is no fault.
            yield HostFinding(
                (report.name,), "names", "ok", f"{text}; horovodrun --gloo does without"
            )
        else:
            yield HostFinding(
                (report.name,),
                "names",
                "fault",
                f"{text}: workers of this Horovod, not built by hvdkit, end with a segmentation "
                "fault",
                f"put all hosts into /etc/hosts on {report.name}, or into DNS; or hvdkit install, "
                "whose Horovod does without",
            )


def judge_ways(reports: Sequence[HostReport], launch: Launch) -> Iterator[HostFinding]:
    """Say which hosts do not reach which others."""
    for report in reports:
        assert report.answer is not None
        if not launch.interfaces and report.answer["way"] is None:
            yield HostFinding(
                (report.name,),
                "network",
                "fault",
                f"no way leads to the launcher at {launch.address}",
                "add a route there, or start the job on a host of the same network",
            )
        for other, error in report.reached.items():
            if error:
                yield HostFinding(
                    (report.name,),
                    "connection",
                    "fault",
                    f"it does not reach {other}, {error}",
                    f"let {report.name} open TCP connections to {other} on every port (firewall, "
                    "route): workers listen on free ones",
                )


def _describe(addresses: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {address}" for name, address in addresses.items())


def _list_outer(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the interfaces that other hosts may reach."""
    addresses = answer.get("addresses", {})
    return {name: one for name, one in addresses.items() if not one.startswith("127.")}
