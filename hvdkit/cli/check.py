"""`hvdkit check`: the collectives of this Horovod, checked by arithmetic under horovodrun."""

from collections.abc import Sequence

import click

from hvdkit.cli.names import split_names

__all__ = ["check", "report_checks"]


@click.command()
@click.option(
    "--np",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of workers.",
)
@click.option(
    "--frameworks",
    callback=split_names,
    metavar="LIST",
    help="torch, tensorflow or torch,tensorflow. [default: those that Horovod was built for]",
)
@click.option("--hosts", metavar="LIST", help="As for horovodrun -H, for example a:1,b:1.")
@click.option(
    "--controller",
    type=click.Choice(["gloo", "mpi"]),
    default="gloo",
    show_default=True,
    help="How the workers find and talk to each other.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds for each framework.",
)
@click.argument("horovodrun_options", nargs=-1, type=click.UNPROCESSED)
def check(
    np: int,
    frameworks: tuple[str, ...] | None,
    hosts: str | None,
    controller: str,
    deadline: float,
    horovodrun_options: tuple[str, ...],
) -> None:
    """Check every collective of this Horovod with N workers.

    Options after `--` go to horovodrun, for example: hvdkit check --hosts a:1,b:1 -- --ssh-port 22
    """
    from hvdkit.errors import HvdkitError
    from hvdkit.install.installed import find_horovod

    if horovodrun_options and not horovodrun_options[0].startswith("-"):
        # horovodrun would take it for the command to start.
        raise click.UsageError(f"{horovodrun_options[0]!r} is no option of horovodrun")
    if frameworks == ():
        raise HvdkitError("--frameworks is empty; give one or more of: torch, tensorflow.")
    horovod = find_horovod()
    if horovod is None:
        raise HvdkitError("Horovod is not installed in this environment; run: hvdkit install")
    for name in frameworks or ():
        if name not in horovod.libraries:
            built = ", ".join(horovod.libraries) or "nothing"
            raise HvdkitError(
                f"This Horovod was not built for {name!r} (built for: {built}). "
                f"Install the framework, then run: hvdkit install"
            )
    names = frameworks or tuple(horovod.libraries)
    if not names:
        raise HvdkitError("This Horovod was built for no framework; run: hvdkit install")
    controllers = horovod.record.get("controllers")
    if isinstance(controllers, list) and controller not in controllers:
        raise HvdkitError(
            f"This Horovod was built without {controller.upper()}; run: hvdkit install --with-mpi"
        )
    if not report_checks(names, np, controller, hosts, horovodrun_options, deadline):
        raise SystemExit(1)


def report_checks(
    names: Sequence[str],
    np: int,
    controller: str = "gloo",
    hosts: str | None = None,
    horovodrun_options: Sequence[str] = (),
    deadline_s: float = 120.0,
) -> bool:
    """Check frameworks one after the other, print the results; return whether all passed."""
    from rich.console import Console
    from rich.table import Table

    from hvdkit.install.prove import check_framework

    console = Console(highlight=False)
    proofs = []
    for name in names:
        console.print(f"Checking {name} with {np} workers ...")
        proofs.append(check_framework(name, np, controller, hosts, horovodrun_options, deadline_s))
    table = Table("check", *(proof.framework for proof in proofs))
    results = [{outcome.name: outcome for outcome in proof.outcomes} for proof in proofs]
    for check_name in dict.fromkeys(name for result in results for name in result):
        cells = []
        for result in results:
            outcome = result.get(check_name)
            if outcome is None:
                cells.append("not run")
            else:
                ranks = ", ".join(map(str, outcome.errors))
                cells.append(f"failed on {ranks}" if ranks else "ok")
        table.add_row(check_name, *cells)
    if any(results):
        console.print(table)
    for proof in proofs:
        if proof.passed:
            continue
        problem = proof.failure or "checks failed"
        console.print(f"{proof.framework}: {problem}", style="bold", markup=False)
        for outcome in proof.outcomes:
            for rank, error in outcome.errors.items():
                console.print(f"  {outcome.name}, rank {rank}: {error}", markup=False)
        for line in proof.last_lines:
            console.print(f"  | {line}", markup=False, soft_wrap=True)
    return all(proof.passed for proof in proofs)
