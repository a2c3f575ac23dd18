"""The batch scripts of examples/cluster, submitted as they are to a real Slurm."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.install.installed import find_horovod
from tests.system.command import ROOT
from tests.system.ssh_server import SshServer, make_key, write_client

SCRIPTS = ROOT / "examples" / "cluster"
TRAINED = "replicas identical: 2 worker(s) hold the same weights"
SMALL = ("--epochs", "1")
PORT = 2222


def submit(slurm, name, **variables):
    code, output = slurm.submit(SCRIPTS / name, arguments=SMALL, VENV=sys.prefix, **variables)
    assert code == 0, output
    assert output.count(TRAINED) == 1, output
    return output


def test_srun_with_hvdkit_exec(slurm):
    submit(slurm, "slurm_exec.sh")


def test_srun_with_mpi(slurm):
    if "mpi" not in find_horovod().record["controllers"]:
        pytest.skip("Horovod is built without MPI (run: hvdkit install --with-mpi)")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    submit(slurm, "slurm_srun_mpi.sh", **root)


@pytest.fixture
def servers(slurm, tmp_path):
    """An OpenSSH server on each node; gives what a client needs."""
    key = make_key(tmp_path / "key")
    with contextlib.ExitStack() as stack:
        for node, address in slurm.addresses.items():
            folder = tmp_path / node
            folder.mkdir()
            authorized = key.with_suffix(".pub")
            server = SshServer(folder, [address], PORT, authorized, slurm.enter(node))

            def answers(node=node, address=address):
                knock = f"import socket; socket.create_connection(('{address}', {PORT}), 1)"
                return slurm.run(sys.executable, "-c", knock, node=node).returncode == 0

            stack.enter_context(server.running(answers))
        yield key, write_client(tmp_path / "client")


def test_horovodrun(slurm, servers):
    key, client = servers
    output = submit(
        slurm,
        "slurm_horovodrun.sh",
        PATH=f"{client}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        HOROVODRUN_OPTIONS=f"--ssh-port {PORT} --ssh-identity-file {key} --disable-cache",
    )
    assert "[0]<stdout>:2 worker(s) on cpu" in output


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_sound(path):
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (Debian: apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
