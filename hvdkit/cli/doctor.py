"""`hvdkit doctor`: what is installed, whether it fits, and what mends it; on all hosts of a job."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hvdkit.install.hosts.listing import HostSlots

__all__ = ["doctor"]

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--hosts",
    "-H",
    metavar="LIST",
    help="Examine the hosts of a job before it is started; as for horovodrun -H, for example "
    "a:4,b:4.",
)
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The same, as for horovodrun --hostfile: a line NAME slots=N a host.",
)
@click.option("--ssh-port", "-p", type=click.IntRange(1, 65535), metavar="N", help="As horovodrun.")
@click.option(
    "--ssh-identity-file",
    "-i",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="As horovodrun.",
)
@click.option("--network-interfaces", metavar="LIST", help="As horovodrun, for example eth0,ib0.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds for each host. [default: 60]",
)
def doctor(
    as_json: bool,
    hosts: str | None,
    hostfile: Path | None,
    ssh_port: int | None,
    ssh_identity_file: Path | None,
    network_interfaces: str | None,
    timeout: float | None,
) -> None:
    """Report what is installed, what Horovod was built against, and whether it still fits.

    With --hosts or --hostfile: whether horovodrun can start a job on these hosts, what differs
    between them, and whether they reach each other; the options as horovodrun has them.

    Exits with 1 when something is a fault; warnings alone exit with 0.
    """
    if hosts is not None and hostfile is not None:
        raise click.UsageError("--hosts and --hostfile say the same; give one of them")
    if hosts is not None or hostfile is not None:
        from hvdkit.install.hosts.listing import parse_hosts, read_host_file

        listed = parse_hosts(hosts) if hosts is not None else read_host_file(hostfile or Path())
        names = [name.strip() for name in (network_interfaces or "").split(",") if name.strip()]
        _report_hosts(
            as_json,
            listed,
            port=ssh_port,
            identity=ssh_identity_file,
            interfaces=names,
            timeout_s=timeout or 60.0,
        )
        return
    for option, value in {
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--network-interfaces": network_interfaces,
        "--timeout": timeout,
    }.items():
        if value is not None:
            raise click.UsageError(f"{option} is for several hosts; name them with --hosts")
    _report_environment(as_json)


def _report_environment(as_json: bool) -> None:
    import dataclasses

    from hvdkit.install.doctor import examine, summarize

    findings = examine()
    if as_json:
        _print_json(summarize(), [dataclasses.asdict(finding) for finding in findings])
    else:
        rows = ((f.level, (f.topic,), f.text, f.remedy) for f in findings)
        _print_table(("",), rows)
    _finish(as_json, [finding.level for finding in findings])


def _report_hosts(as_json: bool, listed: "list[HostSlots]", **options: Any) -> None:
    import dataclasses

    from hvdkit.install.hosts.examine import examine_hosts

    reports, findings = examine_hosts(listed, **options)
    if as_json:
        facts = {
            "hosts": {
                report.name: {
                    "slots": report.host.slots if report.listed else 0,
                    "address": report.address,
                    "local": report.local,
                    "found": report.answer,
                    "reached": report.reached,
                }
                for report in reports
            }
        }
        _print_json(facts, [dataclasses.asdict(finding) for finding in findings])
    else:
        rows = ((f.level, (", ".join(f.hosts), f.topic), f.text, f.remedy) for f in findings)
        _print_table(("on", ""), rows)
    _finish(as_json, [finding.level for finding in findings])


def _print_json(facts: dict, findings: list[dict]) -> None:
    import json

    healthy = not any(finding["level"] == "fault" for finding in findings)
    click.echo(json.dumps({**facts, "healthy": healthy, "findings": findings}, indent=1))


def _print_table(
    headings: tuple[str, ...], rows: Iterable[tuple[str, tuple[str, ...], str, str]]
) -> None:
    """Print rows of level, topics, what was found, and what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in (*headings, "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for level, topics, text, remedy in rows:
        words = text if level == "ok" else f"{level}: {text}"
        table.add_row(*(Text(topic, STYLES[level]) for topic in topics), Text(words), Text(remedy))
    Console(highlight=False).print(table)


def _finish(as_json: bool, levels: list[str]) -> None:
    faults = levels.count("fault")
    if not as_json:
        count = f"{faults} fault{'s' if faults > 1 else ''}"
        click.echo(f"{count}; the last column says what mends it." if faults else "No faults.")
    if faults:
        raise SystemExit(1)
