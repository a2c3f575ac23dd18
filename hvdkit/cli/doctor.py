"""`hvdkit doctor`: what is installed, whether it fits, and what mends it."""

import click

__all__ = ["doctor"]

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Report what is installed, what Horovod was built against, and whether it still fits.

    Exits with 1 when something is a fault; warnings alone exit with 0.
    """
    import dataclasses
    import json

    from hvdkit.install.doctor import examine, summarize

    findings = examine()
    faults = [finding for finding in findings if finding.level == "fault"]
    if as_json:
        report = {
            **summarize(),
            "healthy": not faults,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        click.echo(json.dumps(report, indent=1))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for heading in ("", "found", "what to do"):
            table.add_column(heading, overflow="fold")
        for finding in findings:
            style = STYLES[finding.level]
            level = "" if finding.level == "ok" else f"{finding.level}: "
            table.add_row(
                Text(finding.topic, style), Text(level + finding.text), Text(finding.remedy)
            )
        console = Console(highlight=False)
        console.print(table)
        if not faults:
            console.print("No faults.")
        else:
            count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
            console.print(f"{count}; the last column says what mends it.")
    if faults:
        raise SystemExit(1)
