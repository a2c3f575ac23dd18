"""`hvdkit install`: show the plan, build or reuse the wheel, install it, prove it."""

import signal
from pathlib import Path
from typing import NoReturn

import click

from hvdkit.cli.names import split_names

__all__ = ["install"]


@click.command()
@click.option(
    "--frameworks",
    callback=split_names,
    metavar="LIST",
    help="torch, tensorflow or torch,tensorflow. [default: those installed]",
)
@click.option(
    "--with-mpi/--without-mpi",
    "mpi",
    default=None,
    help="Build the MPI controller. [default: if a working MPI is found]",
)
@click.option("--gpu", type=click.Choice(["nccl"]), help="Reduce tensors on GPUs.")
@click.option("--jobs", type=int, metavar="N", help="Compilers at once. [default: cores, memory]")
@click.option(
    "--sdist",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Horovod's source distribution, for use without an index.",
)
@click.option(
    "--wheel-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Put the wheel here for other nodes and install nothing.",
)
@click.option("--force", is_flag=True, help="Build and install even if it is there already.")
@click.option("--no-prove", is_flag=True, help="Skip the two-worker check at the end.")
@click.option("--dry-run", is_flag=True, help="Show the plan and do nothing.")
def install(
    frameworks: tuple[str, ...] | None,
    mpi: bool | None,
    gpu: str | None,
    jobs: int | None,
    sdist: Path | None,
    wheel_dir: Path | None,
    force: bool,
    no_prove: bool,
    dry_run: bool,
) -> None:
    """Build Horovod for the frameworks of this environment, install it and prove it.

    The wheel is kept in a cache ($HVDKIT_CACHE_DIR, or hvdkit under ~/.cache), so that the next
    environment with the same frameworks needs no compilation.
    """
    from hvdkit.cli.build_display import BuildDisplay, show_plan
    from hvdkit.install.cache import WheelCache, cache_root
    from hvdkit.install.plan import Options
    from hvdkit.install.sdist import verify
    from hvdkit.install.steps import (
        copy_wheel,
        draw_plan,
        install_wheel,
        is_installed,
        obtain_wheel,
        require_buildable,
        require_writable,
    )

    signal.signal(signal.SIGTERM, _stop)
    root = cache_root()
    plan = draw_plan(Options(frameworks, mpi, gpu, jobs), root)
    cached = WheelCache(root).find(plan.key)
    show_plan(plan, cached, edits=dry_run)
    if dry_run:
        if sdist is not None:
            verify(sdist)
        if cached is None:
            require_buildable(plan)
        return
    if wheel_dir is None and not force and is_installed(plan):
        click.echo("Horovod is installed as planned; nothing to do (--force builds it again).")
        return
    if wheel_dir is not None:
        if cached is None or force:
            require_buildable(plan)
        require_writable(wheel_dir)
    with BuildDisplay() as display:
        wheel, built = obtain_wheel(plan, root, display, sdist, force)
    click.echo(f"{'Built' if built else 'Found in the cache:'} {wheel}")
    if wheel_dir is not None:
        click.echo(f"On each node: pip install --no-deps {copy_wheel(wheel, wheel_dir)}")
        return
    install_wheel(wheel)
    click.echo("Installed Horovod.")
    if not no_prove:
        from hvdkit.cli.check import report_checks

        names = tuple(framework.name for framework in plan.frameworks)
        if not report_checks(names, np=2):
            raise SystemExit(1)


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
