"""A report as Markdown, for a pull request: tables without images."""

from __future__ import annotations

import re

from hvdkit.results.report.parts import Report, Section, Table

__all__ = ["write_markdown"]

_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")


def write_markdown(report: Report) -> str:
    """Return a report as GitHub Flavored Markdown; long tables are left out."""
    lines = [f"## {_escape(report.title)}", ""]
    for warning in report.warnings:
        lines += [f"> **Warning:** {_escape(warning)}", ">"]
    if report.warnings:
        lines[-1] = ""
    for section in report.sections:
        lines += _write_section(section)
    return "\n".join(lines).rstrip() + "\n"


def _write_section(section: Section) -> list[str]:
    lines = [f"### {_escape(section.title)}", ""]
    for table in section.tables:
        if not table.folded:
            lines += _write_table(table)
    for note in section.notes:
        lines += [_escape(note), ""]
    return lines


def _write_table(table: Table) -> list[str]:
    rules = ["---" if place < table.names else "---:" for place in range(len(table.headings))]
    rows = [list(map(_escape, table.headings)), rules, *(map(_escape, row) for row in table.rows)]
    return [f"{_escape(table.title)}:", "", *("| " + " | ".join(row) + " |" for row in rows), ""]


def _escape(text: str) -> str:
    """Make a text mean itself, in HTML and in Markdown."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", text)
