"""A Slurm of the test's own: a controller and two nodes, each node a network namespace.

Nothing of the machine's own Slurm, munge or network is used or changed. The nodes have one network
between them, host names and an /etc/hosts of their own, and share the file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.launch import ROOT

NODES = {"hva": "10.77.0.1", "hvb": "10.77.0.2"}
# Names under which pods of a Kubernetes Job would be found, by their node.
PODS = {name: f"digits-{index}.digits.ns.svc.cluster.local" for index, name in enumerate(NODES)}
GRACE_S = 30.0
JOB_S = 120.0
CONFIG = """\
ClusterName=hvdkit
SlurmctldHost=hva({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=5
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=batch_sched_delay=0
{nodes}
PartitionName=main Nodes=hva,hvb Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""

__all__ = ["NODES", "PODS", "Slurm", "serve"]


class Slurm:
    """A running cluster; made by :func:`serve`.

    Attributes:
        folder: Where its files are, and where batch scripts put their output.
        addresses: Of the nodes, by their names; the first has rank 0, unless told otherwise.
    """

    addresses = NODES

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spaces = {name: f"{name}-{os.getpid()}" for name in NODES}
        self._daemons: list[subprocess.Popen] = []
        self._path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        lines = [f"{NODES[node]} {pod} {pod.partition('.')[0]}" for node, pod in PODS.items()]
        lines += [f"{address} {name}" for name, address in NODES.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={at} CPUs=2 State=UNKNOWN" for name, at in NODES.items()
        )
        (folder / "slurm.conf").write_text(
            CONFIG.format(folder=folder, address=NODES["hva"], nodes=nodes)
        )
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))

    def run(
        self,
        *command: object,
        node: str = "hva",
        timeout_s: float = 120,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess:
        """Run a command on a node and return it when it has ended."""
        process = self.start(*command, node=node, **(variables or {}))
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"not done in {timeout_s} s: {command}\n{output}") from None
        return subprocess.CompletedProcess(command, process.returncode, output)

    def start(
        self, *command: object, node: str = "hva", hostname: str | None = None, **variables: object
    ) -> subprocess.Popen:
        """Start a command on a node; output and errors together are its ``stdout``."""
        return self._spawn(
            self.enter(node, hostname), command, variables, stdout=subprocess.PIPE, text=True
        )

    def submit(
        self, script: Path, *options: str, arguments: Sequence[str] = (), **variables: object
    ) -> tuple[int, str]:
        """Submit a batch script, wait for its end; return its exit code and output."""
        log = self.folder / f"{script.stem}.out"
        command = ("sbatch", "--parsable", f"--output={log}", *options, script, *arguments)
        submitted = self.run(*command, variables=variables)
        assert submitted.returncode == 0, submitted.stdout
        deadline = time.monotonic() + JOB_S
        while time.monotonic() < deadline:  # sbatch --wait would ask every ten seconds
            shown = self.run("scontrol", "--oneliner", "show", "job", submitted.stdout.strip())
            state = re.search(r"JobState=(\w+)", shown.stdout)[1]
            if state not in ("PENDING", "RUNNING", "COMPLETING"):
                code = int(re.search(r"ExitCode=(\d+):", shown.stdout)[1])
                return code, log.read_text(encoding="utf-8")
            time.sleep(0.2)
        raise AssertionError(f"not done in {JOB_S} s: {shown.stdout}\n{self.explain()}")

    def enter(self, node: str, hostname: str | None = None) -> list[str]:
        """Return the words to put before a command line so that it runs on a node."""
        setup = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/{self._spaces[node]}", "unshare", "--uts", "--mount"),
            *("sh", "-c", setup, str(self.folder / "hosts"), hostname or node),
        ]

    def find_processes(self, text: str) -> list[str]:
        """Return the command lines on all nodes that have a text in them."""
        found = []
        for name in NODES:
            for pid in self._list_processes(name):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    found.append(line.replace(b"\0", b" ").decode(errors="replace"))
        return [line for line in found if text in line]

    @contextlib.contextmanager
    def running(self) -> Iterator[Slurm]:
        """Serve until the block ends; nothing is left afterwards."""
        try:
            self._join_nodes()
            self._daemons = [
                self._serve("hva", "munged", "--foreground", "--force", *self._munge_options()),
                self._serve("hva", "slurmctld", "-D"),
                *(self._serve(name, "slurmd", "-D", "-N", name) for name in NODES),
            ]
            self._await_nodes()
            yield self
        finally:
            self._end()

    def explain(self) -> str:
        """Return the last lines of all logs."""
        tails = []
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-15:]
            tails += [f"-- {log.name}", *lines]
        return "\n".join(tails)

    def _munge_options(self) -> list[str]:
        names = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        return [f"--{option}={self.folder / name}" for option, name in names.items()]

    def _join_nodes(self) -> None:
        first, second = self._spaces.values()
        for space in (first, second):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        cable = ("type", "veth", "peer", "name", "eth0", "netns", second)
        _ip("-n", first, "link", "add", "eth0", *cable)
        for name, space in self._spaces.items():
            _ip("-n", space, "addr", "add", f"{NODES[name]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _serve(self, node: str, *command: str) -> subprocess.Popen:
        log = self.folder / f"{node}-{command[0]}.log"
        with log.open("wb") as output:
            return self._spawn(self.enter(node), command, {}, stdout=output)

    def _spawn(
        self,
        prefix: Sequence[str],
        command: Sequence[object],
        variables: Mapping[str, object],
        **options: Any,
    ) -> subprocess.Popen:
        ours = {
            "PATH": self._path,
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        return subprocess.Popen(
            [*prefix, *map(str, command)],
            cwd=ROOT,
            env={**os.environ, **ours, **{name: str(text) for name, text in variables.items()}},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if any(daemon.poll() is not None for daemon in self._daemons):
                break
            shown = self.run("sinfo", "--noheader", "--format=%T %D").stdout.strip()
            if shown == f"idle {len(NODES)}":
                return
            time.sleep(0.2)
        raise AssertionError(f"the nodes did not come up: {shown}\n{self.explain()}")

    def _list_processes(self, node: str) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", self._spaces[node]],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": self._path},
        )
        return [int(pid) for pid in done.stdout.split()]

    def _end(self) -> None:
        for _ in range(20):  # those that a dying process starts meanwhile, too
            pids = [pid for name in NODES for pid in self._list_processes(name)]
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for daemon in self._daemons:
            daemon.wait(GRACE_S)
        for space in self._spaces.values():
            if Path("/run/netns", space).exists():
                _ip("netns", "delete", space)


@contextlib.contextmanager
def serve() -> Iterator[Slurm]:
    """Start a cluster; end it with the block, and remove all that it was made of."""
    # Short, since the path of a socket has a limit of a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="hvdkit-slurm-"))
    try:
        with Slurm(folder).running() as slurm:
            yield slurm
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ip(*arguments: str) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    if done.returncode != 0:
        raise AssertionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
