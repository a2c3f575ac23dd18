"""`hvdkit exec`: a worker of a job that srun, mpirun or Kubernetes started, without ssh."""

import click

__all__ = ["execute"]


@click.command(name="exec", context_settings={"allow_interspersed_args": False})
@click.option(
    "-np",
    "size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of workers; an error where the job has another one. A Kubernetes Job needs it.",
)
@click.option(
    "--rendezvous",
    metavar="HOST[:PORT]",
    help="Where rank 0 runs, as the others reach it. [default: as the scheduler tells]",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="R",
    help="Of this process, for schedulers that hvdkit does not know; needs -np and --rendezvous.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds in which all workers must have started.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def execute(
    size: int | None,
    rendezvous: str | None,
    rank: int | None,
    timeout_s: float,
    command: tuple[str, ...],
) -> None:
    """Become COMMAND, a worker of the job that this process was started in.

    A launcher starts this once for each worker, and neither horovodrun nor ssh is needed:

    \b
      srun --ntasks 4 hvdkit exec -- python train.py
      mpirun -np 4 --bind-to none hvdkit exec -- python train.py
      hvdkit exec -np 4 -- python train.py            (in a Kubernetes Indexed Job)
      hvdkit exec --rank $RANK -np $WORLD_SIZE --rendezvous $MASTER_ADDR:$MASTER_PORT -- COMMAND

    The workers meet at a rendezvous server beside rank 0, and talk to each other by Gloo.
    """  # noqa: D301  (click's mark for lines to be left as they are)
    import os
    import shutil
    import signal

    from hvdkit.errors import EnvironmentMismatchError
    from hvdkit.launch.client import join
    from hvdkit.launch.job import find_job, parse_server
    from hvdkit.launch.server import start_server

    if shutil.which(command[0]) is None:
        raise click.UsageError(f"{command[0]!r} is no program that can be run here")
    try:
        server = None if rendezvous is None else parse_server(rendezvous)
    except ValueError:
        raise click.BadParameter(
            f"{rendezvous!r} is no HOST or HOST:PORT", param_hint="--rendezvous"
        ) from None
    try:
        job = find_job(os.environ, size, rank, server)
    except EnvironmentMismatchError as error:
        raise click.UsageError(str(error)) from None
    port = start_server(job, timeout_s) if job.rank == 0 else None
    variables = join(job, timeout_s, port)
    # As horovodrun sets it: the last lines of a worker that is killed are not lost.
    variables["PYTHONUNBUFFERED"] = "1"
    # Python ignores these, and COMMAND would inherit that.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        raise click.ClickException(f"cannot run {command[0]!r}: {error.strerror}") from None
