"""The job that this process is a rank of, and where rank 0's rendezvous server can be."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.env import Place, launcher, place
from hvdkit.errors import EnvironmentMismatchError
from hvdkit.launch.board import FileBoard
from hvdkit.launch.nodes import list_candidates

__all__ = ["LOOPBACK", "Job", "find_job", "parse_server"]

LOOPBACK = "127.0.0.1"
# Below those that Linux gives to outgoing connections. Several, since one may be taken.
FIRST_PORT, PORTS, TRIED = 20_000, 10_000, 4
_OURS = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR")


@dataclass(frozen=True)
class Job:
    """What a rank knows of its job before it has met the others.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        key: The same on all ranks, and in no other job.
        hosts: On which the server can be, as this host names them; () where ``board`` tells.
        ports: On which it can listen.
        board: Where rank 0 tells the others.
        kind: What set the rank: a launcher of ``hvdkit.env``, "Kubernetes" or "options".
    """

    rank: int
    size: int
    key: str
    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    board: FileBoard | None = None
    kind: str = "options"


def find_job(
    environ: Mapping[str, str],
    size: int | None = None,
    rank: int | None = None,
    server: tuple[str, int | None] | None = None,
) -> Job:
    """Return this process's job.

    Args:
        environ: The process's variables.
        size: Number of workers that the user asked for.
        rank: For schedulers that hvdkit does not know.
        server: Host and port where rank 0 shall serve.

    Raises:
        EnvironmentMismatchError: A launcher of Horovod's started this process, nothing says which
            rank it is, another size was asked for than the job has, or nothing tells where rank 0
            is.
    """
    ours = [name for name in _OURS if name in environ]
    if ours:
        raise EnvironmentMismatchError(
            f"{ours[0]}={environ[ours[0]]} is set: horovodrun or hvdkit exec started this process "
            "already. Start the command itself, without hvdkit exec"
        )
    name = launcher(environ)
    if rank is not None:
        return _from_options(rank, size, server)
    if name is not None:
        here = place(environ)
        if size not in (None, here.size):
            raise EnvironmentMismatchError(
                f"{name} started {here.size} processes, but -np {size} asks for {size}. Start as "
                "many as you ask for, or leave out -np"
            )
        return _from_launcher(environ, here, server)
    if "JOB_COMPLETION_INDEX" in environ:
        return _from_indexed_job(environ, size, server)
    if "SLURM_JOB_ID" in environ:
        place(environ)  # says that this is a batch script
    raise EnvironmentMismatchError(
        "Nothing says which rank this process is. Start hvdkit exec by srun or mpirun, in a "
        "Kubernetes Indexed Job, or say it on each: --rank R -np N --rendezvous HOST:PORT"
    )


def parse_server(text: str) -> tuple[str, int | None]:
    """Return the host and the port, if any, of "HOST[:PORT]".

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"([\w.-]+)(?::(\d+))?", text)
    if match is None or not 0 < int(match[2] or 1) < 65536:
        raise ValueError(text)
    return match[1], int(match[2]) if match[2] else None


def _from_launcher(
    environ: Mapping[str, str], here: Place, server: tuple[str, int | None] | None
) -> Job:
    alone = here.local_size == here.size
    hosts: tuple[str, ...] = (LOOPBACK,) if alone else ()
    board = None
    if here.launcher == "Slurm":
        identity = "-".join(
            environ.get(f"SLURM_{part}", "") for part in ("CLUSTER_NAME", "JOB_ID", "STEP_ID")
        )
        if not alone and server is None:
            hosts = list_candidates(environ)
    elif here.launcher == "Open MPI" and "PMIX_NAMESPACE" in environ:
        identity = environ["PMIX_NAMESPACE"]
        if not alone and server is None:
            board = FileBoard(f"exec-openmpi-{identity}")
    elif server is not None:
        identity = _name_server(server)
    elif alone:
        identity = _find_starter()
    else:
        raise EnvironmentMismatchError(
            f"{here.launcher} does not tell its processes on which host rank 0 is. Name that host, "
            "and a free port of it: --rendezvous HOST:PORT"
        )
    return _make(here.rank, here.size, identity, hosts, server, board, here.launcher)


def _from_indexed_job(
    environ: Mapping[str, str], size: int | None, server: tuple[str, int | None] | None
) -> Job:
    text = environ["JOB_COMPLETION_INDEX"]
    if not text.isdecimal():
        raise EnvironmentMismatchError(f"JOB_COMPLETION_INDEX={text!r} is not a number")
    if size is None:
        raise EnvironmentMismatchError(
            "A Kubernetes Job does not tell its pods how many they are: say it with -np N, the "
            "Job's spec.completions"
        )
    rank = _check_rank(int(text), size, "JOB_COMPLETION_INDEX")
    hosts: tuple[str, ...] = ()
    if server is not None:
        identity = _name_server(server)
    else:
        # A pod is named JOB-INDEX, and JOB-INDEX.SERVICE where a headless Service covers it.
        own = (socket.getfqdn(), socket.gethostname())
        matches = [re.fullmatch(rf"(.*)-{rank}(\..*)?", name) for name in own]
        hosts = tuple(dict.fromkeys(f"{m[1]}-0{m[2] or ''}" for m in matches if m))
        if not hosts:
            raise EnvironmentMismatchError(
                f"This host is named {own[1]}, not JOB-{rank} as the pods of an Indexed Job are, "
                "so it does not tell the name of pod 0. Name it: --rendezvous HOST[:PORT]"
            )
        identity = hosts[-1].partition(".")[0]
    return _make(rank, size, identity, hosts, server, None, "Kubernetes")


def _from_options(rank: int, size: int | None, server: tuple[str, int | None] | None) -> Job:
    if size is None or server is None:
        raise EnvironmentMismatchError(
            "--rank needs -np and --rendezvous, for example: hvdkit exec --rank $RANK "
            "-np $WORLD_SIZE --rendezvous $MASTER_ADDR:$MASTER_PORT -- python train.py"
        )
    return _make(_check_rank(rank, size, "--rank"), size, _name_server(server), (), server)


def _name_server(server: tuple[str, int | None]) -> str:
    # The host as well would be in the way where rank 0 knows it by another name.
    return str(server[1] or server[0])


def _check_rank(rank: int, size: int, name: str) -> int:
    if not 0 <= rank < size:
        raise EnvironmentMismatchError(
            f"{name} is {rank}, which does not fit -np {size}; expected 0 to {size - 1}"
        )
    return rank


def _make(
    rank: int,
    size: int,
    identity: str,
    hosts: tuple[str, ...],
    server: tuple[str, int | None] | None,
    board: FileBoard | None = None,
    kind: str = "options",
) -> Job:
    key = hashlib.sha256(f"{kind} {identity}".encode()).hexdigest()
    if server is not None:
        hosts = (server[0],)
    if server is not None and server[1] is not None:
        ports: tuple[int, ...] = (server[1],)
    else:
        parts = (key[start : start + 8] for start in range(0, 8 * TRIED, 8))
        ports = tuple(FIRST_PORT + int(part, 16) % PORTS for part in parts)
    return Job(rank, size, key, hosts, ports, board, kind)


def _find_starter() -> str:
    """Return what identifies MPICH's process manager of this host, which started all ranks."""
    pid = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            break
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if name.startswith(("hydra_pmi_proxy", "hydra_bstrap")):
            return f"{pid}.{fields[19]}"  # with the time of its start
        pid = int(fields[1])
    raise EnvironmentMismatchError(
        "MPICH tells its processes no name of the job. Name a host and a free port of it: "
        "--rendezvous 127.0.0.1:PORT"
    )
