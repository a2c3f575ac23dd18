"""Where this process stands among the workers, as the launcher set it before Python started.

For code that runs before Horovod is initialized, or without it: choosing a device, naming a
log file, sharing out threads. A missing variable is an error and never taken for rank 0:
two processes that both believe to be rank 0 overwrite each other's work.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hvdkit.errors import EnvironmentMismatchError, HvdkitError

__all__ = [
    "Place",
    "check_launch",
    "explain_failed_init",
    "is_elastic",
    "is_slurm_task",
    "launcher",
    "local_rank",
    "local_size",
    "place",
    "rank",
    "size",
]


@dataclass(frozen=True)
class Place:
    """The place of a process among all workers.

    Attributes:
        launcher: "horovodrun", "Open MPI", "MPICH" or "Slurm".
        rank: Number among all workers, from 0.
        size: Number of all workers.
        local_rank: Number among the workers of this host, from 0.
        local_size: Number of workers of this host.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


# Launcher -> the variables of rank, size, local rank and local size. The innermost launcher
# comes first: horovodrun may start Open MPI's mpirun inside a Slurm allocation, and each sets
# its own variables. The first variable is the one by which a launcher is recognized.
_LAUNCHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "horovodrun": (
        ("HOROVOD_RANK",),
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
    ),
    "Open MPI": (
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "MPICH": (
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    "Slurm": (
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
}

_FIRST_OWN_STEP = 0xFFFF_FFF0  # slurm/slurm.h: SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP, ...

# What horovodrun sets beside them where the workers meet through its rendezvous server.
_OF_GLOO = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_CONTROLLER")
# Each variable, and the libraries that it may name.
_LIBRARIES = {
    "HOROVOD_CONTROLLER": ("mpi", "gloo"),
    "HOROVOD_CPU_OPERATIONS": ("mpi", "gloo", "ccl"),
}
_LIMITS = (
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
)


def launcher(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the launcher that started this process, or None if no variable of one is set.

    Args:
        environ: The variables; default those of this process.
    """
    environ = os.environ if environ is None else environ
    for name, ((recognized, *_), *_) in _LAUNCHERS.items():
        if recognized in environ and _is_of_this_process(environ, name):
            return name
    return None


def _is_of_this_process(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a launcher whose variables are set started this process, and not the whole."""
    if name == "Slurm":
        return is_slurm_task(environ)
    if name == "MPICH" and "SLURM_PROCID" in environ:
        # srun --mpi=pmi2 sets the rank for MPICH's library, without the local one.
        return any(variable in environ for variable in _LAUNCHERS["MPICH"][2])
    return True


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process.

    A batch script has SLURM_PROCID=0 and the size of its job, yet runs once. So does the shell of
    an interactive allocation, in a step with one of the numbers that Slurm keeps for itself.
    """
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_OWN_STEP


def place(environ: Mapping[str, str] | None = None) -> Place:
    """Return this process's place among all workers.

    Args:
        environ: The variables; default those of this process.

    Raises:
        EnvironmentMismatchError: No launcher set its variables, one of them is missing or is not
            a number, or they contradict each other.
    """
    environ = os.environ if environ is None else environ
    name = launcher(environ)
    if name is None:
        known = ", ".join(variables[0][0] for variables in _LAUNCHERS.values())
        if "SLURM_JOB_ID" in environ:
            raise EnvironmentMismatchError(
                f"This process runs in Slurm's job {environ['SLURM_JOB_ID']}, but is no task that "
                "srun started, and has no rank. Start it with horovodrun, mpirun or srun, for "
                "example: srun hvdkit exec -- python train.py"
            )
        raise EnvironmentMismatchError(
            f"No launcher set the rank of this process (looked for {known}). Start it with "
            "horovodrun, mpirun or srun, for example: horovodrun -np 2 python train.py"
        )
    ranks, sizes, local_ranks, local_sizes = _LAUNCHERS[name]
    rank = _read(environ, name, ranks)
    size = _read(environ, name, sizes)
    local_rank = _read(environ, name, local_ranks)
    if name == "Slurm":
        local_size = _read_tasks_of_node(environ, local_sizes)
    else:
        local_size = _read(environ, name, local_sizes)
    if not 0 <= rank < size:
        raise EnvironmentMismatchError(
            f"{ranks[0]}={rank} does not fit {size} workers ({' or '.join(sizes)}); expected 0 to "
            f"{size - 1}. Were the variables set by hand, or left over from another launch?"
        )
    if not 0 <= local_rank < local_size or local_size > size:
        raise EnvironmentMismatchError(
            f"Local rank {local_rank} of {local_size} workers on this host does not fit {size} "
            f"workers in all ({', '.join(local_ranks + local_sizes)}). Were the variables set by "
            "hand, or left over from another launch?"
        )
    return Place(name, rank, size, local_rank, local_size)


def check_launch(environ: Mapping[str, str] | None = None, *, mpi_built: bool = False) -> None:
    """Check Horovod's own variables before it reads them; without any there is nothing to check.

    Horovod takes a missing rank for 0, a missing size for 1, a limit that is no number for 0, and
    aborts on what does not fit: a wrapper that loses all of them makes each worker a job alone.

    Args:
        environ: The variables; default those of this process.
        mpi_built: Whether Horovod was built with MPI, which it prefers then.

    Raises:
        EnvironmentMismatchError: As :func:`place`; if some of the launcher's variables are missing;
            if a limit is not a whole number of seconds; if there is no such controller, or one that
            Horovod cannot use for the operations asked for.
    """
    environ = os.environ if environ is None else environ
    expected = [variable for (variable,) in _LAUNCHERS["horovodrun"]]
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ or "HOROVOD_GLOO_RENDEZVOUS_PORT" in environ:
        expected += _OF_GLOO
    there = [variable for variable in expected if variable in environ]
    missing = [variable for variable in expected if variable not in environ]
    if there and missing:
        raise EnvironmentMismatchError(
            f"The launcher set {', '.join(there)}, but not {', '.join(missing)}. "
            "Were the variables set by hand, or lost by a wrapper script?"
        )
    if there:
        place(environ)
    for variable in _LIMITS:
        text = environ.get(variable, "0")
        if not re.fullmatch(r"\s*[0-9]+\s*", text):
            raise EnvironmentMismatchError(
                f"{variable}={text!r} is not a whole number of seconds, at least 0."
            )
    _check_libraries(environ, mpi_built)


def _check_libraries(environ: Mapping[str, str], mpi_built: bool) -> None:
    """Refuse what ends in an abort or a segmentation fault."""
    default = "mpi" if mpi_built else "gloo"
    chosen = {}
    for variable, known in _LIBRARIES.items():
        chosen[variable] = environ.get(variable, default).lower()
        if chosen[variable] not in known:
            raise EnvironmentMismatchError(
                f"{variable}={environ[variable]!r} is not one of {', '.join(known)}."
            )
    if tuple(chosen.values()) == ("mpi", "gloo"):
        raise EnvironmentMismatchError(
            "Gloo cannot carry out operations (HOROVOD_CPU_OPERATIONS) under the MPI controller. "
            "Start with horovodrun --gloo, or with hvdkit exec under mpirun or srun, or leave "
            "HOROVOD_CPU_OPERATIONS out."
        )


def is_elastic(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this is an elastic job, in which workers come and go.

    Who joins one constructs everything alone: what ranks compare or exchange at construction
    elsewhere has to wait there until all of them reduce or synchronize.

    Args:
        environ: The variables; default those of this process.
    """
    environ = os.environ if environ is None else environ
    return environ.get("HOROVOD_ELASTIC") == "1"


def rank(environ: Mapping[str, str] | None = None) -> int:
    """Return this process's number among all workers; errors as :func:`place`."""
    return place(environ).rank


def size(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of all workers; errors as :func:`place`."""
    return place(environ).size


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return this process's number among the workers of its host; errors as :func:`place`."""
    return place(environ).local_rank


def local_size(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of workers of this host; errors as :func:`place`."""
    return place(environ).local_size


def _read(environ: Mapping[str, str], name: str, variables: tuple[str, ...]) -> int:
    variable, text = _find(environ, name, variables)
    try:
        return int(text)
    except ValueError:
        raise EnvironmentMismatchError(
            f"{variable}={text!r} is not a number; {name} sets one for each worker."
        ) from None


def _find(environ: Mapping[str, str], name: str, variables: tuple[str, ...]) -> tuple[str, str]:
    for variable in variables:
        if variable in environ:
            return variable, environ[variable]
    raise EnvironmentMismatchError(
        f"{' or '.join(variables)} is not set, though {name} set {_LAUNCHERS[name][0][0]}. "
        "Were the variables set by hand, or lost by a wrapper script?"
    )


def _read_tasks_of_node(environ: Mapping[str, str], variables: tuple[str, ...]) -> int:
    """Return the tasks of this node from Slurm's list for all nodes, such as "2(x3),1"."""
    variable, text = _find(environ, "Slurm", variables)
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise EnvironmentMismatchError(
                f'{variable}={text!r} is not a list of tasks a node, such as "2(x3),1".'
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    node = _read(environ, "Slurm", ("SLURM_NODEID",)) if len(tasks) > 1 else 0
    if not 0 <= node < len(tasks):
        raise EnvironmentMismatchError(
            f"SLURM_NODEID={node} does not fit the {len(tasks)} nodes of {variable}={text}."
        )
    return tasks[node]


@contextmanager
def explain_failed_init(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Say what to look at where Horovod's ``init`` cannot connect the workers.

    Raises:
        HvdkitError: In place of the ValueError that Horovod raises then.
    """
    try:
        yield
    except ValueError as error:
        address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        if "could not be initialized" not in str(error) or address is None:
            raise
        port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        limit_s = environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30")
        raise HvdkitError(
            f"{str(error).rstrip('.')}. Every worker must call hvd.init() within "
            f"HOROVOD_GLOO_TIMEOUT_SECONDS ({limit_s} s) of the others, and reach them and the "
            f"launcher at {address}:{port}; the output of a worker that ended before says why"
        ) from error
