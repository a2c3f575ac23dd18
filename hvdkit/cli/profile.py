"""``hvdkit profile``: where the time of a training step goes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hvdkit.profile.summary import Profile

__all__ = ["profile"]

FILE = click.Path(path_type=Path)


def _parse_counts(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...]:
    if value is None:
        return ()
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is no list of numbers of workers; write 2 or 1,2,4")
    if len(set(parts)) < len(parts):
        raise click.BadParameter(f"{value!r} has a number twice")
    return tuple(map(int, parts))


@click.command()
@click.argument("what", nargs=-1, type=click.UNPROCESSED, metavar="TIMELINE | -- COMMAND...")
@click.option(
    "-np",
    "--workers",
    callback=_parse_counts,
    metavar="N[,N...]",
    help="Run COMMAND with so many workers, once for each number.",
)
@click.option("--hosts", metavar="LIST", help="As for horovodrun -H, for example a:1,b:1.")
@click.option(
    "--every-negotiation",
    is_flag=True,
    help="Switch Horovod's response cache off: slower, but every negotiation says who came last.",
)
@click.option(
    "--folder",
    type=FILE,
    help="Keep timeline and traces here, in np-N for N workers; on several hosts, a folder that "
    "all of them share.",
)
@click.option(
    "--trace",
    type=FILE,
    help="Write one trace of all ranks, for ui.perfetto.dev or chrome://tracing, to this .json or "
    ".json.gz.",
)
@click.option("--output", type=FILE, help="Write what was found to this JSON file.")
@click.option("--force", is_flag=True, help="Overwrite the files of --trace and --output.")
def profile(
    what: tuple[str, ...],
    workers: tuple[int, ...],
    hosts: str | None,
    every_negotiation: bool,
    folder: Path | None,
    trace: Path | None,
    output: Path | None,
    force: bool,
) -> None:
    """Say where the time of a training step goes, from a Horovod timeline.

    \b
    hvdkit profile timeline.json                 a file that HOROVOD_TIMELINE named
    hvdkit profile -np 2 -- python train.py      runs the script and reads what it leaves
    hvdkit profile -np 1,2,4 -- python train.py  the same with more and more workers

    For a script with hvdkit.torch that it runs, it also says how much communication was hidden
    behind the backward pass and which rank the others waited for. The size of a file does not
    matter: little memory is needed.
    """  # noqa: D301 -- click wants the control character itself
    from rich.console import Console

    from hvdkit.cli.profile_tables import show_profiles
    from hvdkit.errors import HvdkitError
    from hvdkit.profile.launch import TIMELINE, warn_of_spinning
    from hvdkit.results.files import make_result, require_writable, write_result
    from hvdkit.results.fingerprint import read_fingerprint

    _check_usage(what, workers, hosts, every_negotiation, folder, trace)
    for path in (trace, output):
        if path is not None:
            require_writable(path, force=force)
    machine = read_fingerprint()
    console = Console(highlight=False)
    failures: list[str] = []
    if workers:
        profiles = []
        with _open_folder(folder) as place:
            for count in workers:
                console.print(f"{count} worker(s): {' '.join(what)}", markup=False)
                found, status = _run(what, count, place / f"np-{count}", hosts, every_negotiation)
                if status:
                    failures.append(f"with {count} worker(s) the command ended with {status}")
                if found:
                    profiles.append(_read(place / f"np-{count}" / TIMELINE, count, trace))
                    warning = None if hosts else warn_of_spinning(count)
                    profiles[-1].summary["notes"] += [warning] if warning else []
                else:
                    failures.append(
                        f"with {count} worker(s) Horovod wrote no timeline: does the command call "
                        "hvd.init() and reduce anything?"
                    )
    else:
        profiles = [_read(Path(what[0]), None, trace)]
    if profiles:
        show_profiles(console, [one.summary for one in profiles])
    if trace is not None and profiles:
        console.print(f"Written to {trace}; open it at ui.perfetto.dev", soft_wrap=True)
    series = [series for one in profiles for series in one.series]
    if output is not None and series:
        settings = {
            "what": list(what),
            "workers": list(workers),
            "hosts": hosts,
            "every_negotiation": every_negotiation,
        }
        summary = {"runs": [one.summary for one in profiles]}
        write_result(
            output, make_result("profile", settings, series, summary, machine), force=force
        )
        console.print(f"Written to {output}", soft_wrap=True)
    elif output is not None:
        failures.append(f"{output} is not written: no steps were found")
    if failures:
        raise HvdkitError("; ".join(failures))


def _check_usage(
    what: tuple[str, ...],
    workers: tuple[int, ...],
    hosts: str | None,
    every_negotiation: bool,
    folder: Path | None,
    trace: Path | None,
) -> None:
    if not what:
        raise click.UsageError("name a timeline, or a command after -np N --")
    if not workers and len(what) > 1:
        raise click.UsageError("to run a command say with how many workers: -np 2 -- COMMAND")
    if not workers and (hosts or every_negotiation or folder):
        raise click.UsageError(
            "--hosts, --every-negotiation and --folder go with -np and a command"
        )
    if hosts and folder is None:
        raise click.UsageError("--hosts needs --folder, on storage that all hosts share")
    if trace is not None and len(workers) > 1:
        raise click.UsageError("--trace goes with one number of workers")
    if trace is not None and not trace.name.endswith((".json", ".json.gz")):
        raise click.UsageError(f"--trace writes .json or .json.gz, not {trace.name}")


@contextlib.contextmanager
def _open_folder(folder: Path | None) -> Iterator[Path]:
    """Yield the folder for what is recorded: the given one, or one that is removed afterwards."""
    if folder is not None:
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="hvdkit-profile-") as scratch:
        yield Path(scratch)


def _run(
    command: tuple[str, ...], workers: int, place: Path, hosts: str | None, every_negotiation: bool
) -> tuple[bool, int]:
    """Run a command; return whether there is a timeline, and the exit status."""
    from hvdkit.errors import HvdkitError
    from hvdkit.install.installed import find_horovod
    from hvdkit.profile.launch import TIMELINE, run_command

    if find_horovod() is None:
        raise HvdkitError("Horovod is not installed in this environment; run: hvdkit install")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HvdkitError(f"cannot make {place}: {error.strerror}") from None
    status = run_command(command, workers, place, hosts=hosts, every_negotiation=every_negotiation)
    timeline = place / TIMELINE
    return timeline.exists() and timeline.stat().st_size > 0, status


def _read(path: Path, workers: int | None, trace: Path | None) -> Profile:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from hvdkit.profile.summary import summarize

    try:
        size_bytes = path.stat().st_size
    except OSError:
        size_bytes = 0  # reading it says why
    columns = (TextColumn("Read {task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(path.name, total=size_bytes)
        return summarize(
            path,
            workers=workers,
            trace=trace,
            progress=lambda done_bytes: progress.update(task, advance=done_bytes),
        )
