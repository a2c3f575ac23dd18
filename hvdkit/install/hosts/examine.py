"""Examining all hosts of a job at once, before it is started."""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.install.hosts.judge import judge
from hvdkit.install.hosts.listing import HostSlots
from hvdkit.install.hosts.party import Party, UnreachableError
from hvdkit.install.hosts.probe import find_way, list_addresses
from hvdkit.install.hosts.report import HostFinding, HostReport, Launch
from hvdkit.install.installed import find_horovod

__all__ = ["examine_hosts"]

# Of the edits to Horovod: with it, hosts choose their addresses themselves.
_CHOOSING = "address-without-probe"
_RESOLVE_S = 10.0
_REACH_S = 20.0


def examine_hosts(
    hosts: Sequence[HostSlots],
    port: int | None = None,
    identity: Path | None = None,
    interfaces: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> tuple[list[HostReport], list[HostFinding]]:
    """Examine hosts as far as horovodrun and its workers depend on them.

    Args:
        hosts: Those of the job.
        port: As ``horovodrun --ssh-port``.
        identity: As ``horovodrun --ssh-identity-file``.
        interfaces: As ``horovodrun --network-interfaces``.
        timeout_s: How long a host may take to describe itself.

    Returns:
        What is known of each host, and what that means.
    """
    return asyncio.run(_examine(hosts, port, identity, tuple(interfaces), timeout_s))


async def _examine(
    hosts: Sequence[HostSlots],
    port: int | None,
    identity: Path | None,
    interfaces: tuple[str, ...],
    timeout_s: float,
) -> tuple[list[HostReport], list[HostFinding]]:
    reports = await asyncio.gather(*(_resolve(host) for host in hosts))
    launch = _plan_launch(reports, interfaces)
    if not any(report.local for report in reports):
        here = HostSlots(f"{socket.gethostname()} (launcher)", 1)
        reports.append(HostReport(here, launch.address, local=True, listed=False))
    parties = {
        report.name: Party(report.name, report.local, port, identity)
        for report in reports
        if report.address is not None
    }
    token = secrets.token_hex(16)
    question = {
        "hosts": [host.name for host in hosts],
        "launcher": launch.address,
        "folder": os.getcwd(),
        "environment": _list_exported(),
        "token": token,
        "package_deadline_s": timeout_s * 0.8,
        "deadline_s": timeout_s + _REACH_S,
    }
    try:
        await asyncio.gather(
            *(
                _describe(report, parties[report.name], question, timeout_s)
                for report in reports
                if report.name in parties
            )
        )
        targets = _list_targets(reports, launch)
        await asyncio.gather(
            *(
                _reach(report, parties[report.name], targets, token)
                for report in reports
                if report.answer is not None
            )
        )
    finally:
        await asyncio.gather(*(party.close() for party in parties.values()))
    return reports, judge(reports, launch, os.getcwd())


async def _resolve(host: HostSlots) -> HostReport:
    """Resolve a name as horovodrun does, and say whether that is this machine."""
    loop = asyncio.get_running_loop()
    try:
        address = await asyncio.wait_for(
            loop.run_in_executor(None, socket.gethostbyname, host.name), _RESOLVE_S
        )
    except (OSError, asyncio.TimeoutError, TimeoutError) as error:
        text = f"the name does not resolve on the launcher: {error or 'no answer'}"
        remedy = "put it into /etc/hosts or DNS, or write the address in place of the name"
        failure = HostFinding((host.name,), "name", "fault", text, remedy)
        return HostReport(host, None, failure=failure)
    return HostReport(host, address, local=_is_local(address))


def _is_local(address: str) -> bool:
    """Whether horovodrun takes an address for its own; of loopback those that are configured."""
    if address.startswith("127."):
        return address in list_addresses().values()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _plan_launch(reports: Sequence[HostReport], interfaces: tuple[str, ...]) -> Launch:
    """Find the address that workers get to meet at, as horovodrun does."""
    horovod = find_horovod()
    edits = horovod.record.get("edits") if horovod else None
    choosing = isinstance(edits, list) and _CHOOSING in edits
    here = list_addresses()
    named = [here[name] for name in interfaces if name in here]
    # Hosts that are this one tell nothing of the way to the others.
    reached = [report for report in reports if report.address is not None and not report.local]
    reached += [report for report in reports if report.address is not None and report.local]
    ways = [find_way(report.address) for report in reached]
    outer = [way for way in ways if way is not None and not way.startswith("127.")]
    address = [*named, *outer, "127.0.0.1"][0]
    if not interfaces and choosing and (given := os.environ.get("HOROVOD_GLOO_IFACE")):
        return Launch(address, tuple(given.split(",")), "HOROVOD_GLOO_IFACE")
    return Launch(address, interfaces, choosing=choosing)


def _list_exported() -> dict[str, str]:
    """Return the variables that horovodrun gives to workers."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("BASH_FUNC") and name != "OLDPWD"
    }


async def _describe(
    report: HostReport, party: Party, question: Mapping[str, Any], timeout_s: float
) -> None:
    report.asked_s = time.time()
    try:
        await party.start()
        report.answer = await party.ask(question, timeout_s)
    except UnreachableError as error:
        report.failure = HostFinding((report.name,), error.topic, "fault", str(error), error.remedy)
    report.answered_s = time.time()


def _list_targets(reports: Sequence[HostReport], launch: Launch) -> dict[str, tuple[str, int]]:
    """Return host name to the address and port at which its probe listens."""
    targets = {}
    for report in reports:
        if report.answer is None or report.answer["port"] is None:
            continue
        address = launch.address if report.local else launch.choose_address(report.answer)
        if address is not None:
            targets[report.name] = (address, report.answer["port"])
    return targets


async def _reach(
    report: HostReport, party: Party, targets: Mapping[str, tuple[str, int]], token: str
) -> None:
    others = {name: place for name, place in targets.items() if name != report.name}
    try:
        answer = await party.ask({"targets": others, "token": token}, _REACH_S)
    except UnreachableError as error:
        answer = dict.fromkeys(others, str(error))
    report.reached = {
        name: error and f"{others[name][0]}, port {others[name][1]}: {error}"
        for name, error in answer.items()
    }
