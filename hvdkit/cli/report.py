"""``hvdkit report``: results as a page with charts, or as Markdown."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["report"]

FILE = click.Path(path_type=Path)
_SUFFIXES = {".html": False, ".htm": False, ".md": True, ".markdown": True}


@click.command()
@click.argument("results", nargs=-1, required=True, type=FILE, metavar="RESULT...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=FILE,
    help="The page (.html), or Markdown for a pull request (.md).",
)
@click.option("--markdown", is_flag=True, help="Write Markdown, whatever the file is called.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def report(results: tuple[Path, ...], output: Path, markdown: bool, force: bool) -> None:
    """Show results in one page: charts, tables, and what was measured where.

    RESULTs are files of any of the benchmarks, of predict and of profile; those of one kind are
    put side by side. The page is one file that needs no network.
    """
    from hvdkit.results.files import require_writable, write_text
    from hvdkit.results.report.build import build_report

    suffix = output.suffix.lower()
    if not markdown and suffix not in _SUFFIXES:
        raise click.UsageError(f"name the output *.html or *.md, or pass --markdown, not {output}")
    require_writable(output, force=force)
    if markdown or _SUFFIXES[suffix]:
        from hvdkit.results.report.markdown import write_markdown as write
    else:
        from hvdkit.results.report.page import require_libraries
        from hvdkit.results.report.page import write_page as write

        require_libraries()
    built = build_report(results)
    for warning in built.warnings:
        click.echo(f"Warning: {warning}", err=True)
    write_text(output, write(built), force=force)
    click.echo(f"Written to {output}")
