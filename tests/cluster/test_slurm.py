"""hvdkit exec under a real Slurm with two nodes, each with a network address of its own."""

import json
import re
import subprocess
import sys
import time

import pytest

from hvdkit.launch.nodes import expand
from tests.system.test_exec import WORKER

EXEC = (sys.executable, "-m", "hvdkit.cli", "exec")
TRAIN = (*EXEC, "--", sys.executable, WORKER)
PLACE = (
    "import json; from hvdkit.env import place; print(json.dumps(vars(place()))); "
    "import os; print(os.environ.get('HOROVOD_GLOO_RENDEZVOUS_ADDR'))"
)
GONE_S = 20


def read_places(output):
    places = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {place["rank"]: place for place in places}


@pytest.mark.parametrize("pmi", ["none", "pmi2", "pmix"])
def test_places_are_slurms(slurm, pmi):
    done = slurm.run("srun", "-N2", "-n3", f"--mpi={pmi}", sys.executable, "-c", PLACE)
    places = read_places(done.stdout)
    assert {rank: (one["local_rank"], one["local_size"]) for rank, one in places.items()} == {
        0: (0, 2),
        1: (1, 2),
        2: (0, 1),
    }, done.stdout
    assert {(one["launcher"], one["size"]) for one in places.values()} == {("Slurm", 3)}


def test_a_batch_script_is_no_rank(slurm):
    script = slurm.folder / "script.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c '{PLACE}'\n{' '.join(EXEC)} -- true\n")
    output = slurm.submit(script, "-N2", "-n2")[1]
    assert output.count("but is no task that srun started") == 2, output


def test_workers_on_two_nodes_train(slurm):
    done = slurm.run("srun", "-N2", "-n2", *EXEC, "-np", "2", "--", sys.executable, WORKER)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"worker {rank} of 2, 0 of 1 here, sum 2" in done.stdout


@pytest.mark.parametrize("nodes", [["hva", "hvb"], ["hvb", "hva"]])
def test_rank_0_is_found_wherever_the_user_puts_it(slurm, nodes):
    order = slurm.folder / "order"
    order.write_text("\n".join([*nodes, ""]))
    command = ("srun", "-N2", "-n2", "--distribution=arbitrary", *EXEC, "--")
    variables = {"SLURM_HOSTFILE": str(order)}
    done = slurm.run(*command, sys.executable, "-c", PLACE, variables=variables)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(slurm.addresses[nodes[0]]) == 2
    assert read_places(done.stdout).keys() == {0, 1}


def test_on_one_node_the_network_is_not_used(slurm):
    done = slurm.run("srun", "-N1", "-n2", *EXEC, "--", sys.executable, "-c", PLACE)
    assert done.stdout.count("127.0.0.1") == 2, done.stdout
    assert {one["local_size"] for one in read_places(done.stdout).values()} == {2}


def test_a_node_whose_name_does_not_resolve_has_an_address_in_slurm(slurm):
    empty = slurm.folder / "no-hosts"
    empty.write_text("127.0.0.1 localhost\n")
    hide = 'umount /etc/hosts; mount --bind $0 /etc/hosts; ! getent hosts hva && exec "$@"'
    command = (*EXEC, "--timeout", "20", "--", sys.executable, "-c", PLACE)
    hidden = ("unshare", "--mount", "sh", "-c", hide, empty)
    done = slurm.run("srun", "-N2", "-n2", *hidden, *command)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(slurm.addresses["hva"]) == 2


def test_another_number_than_slurm_started_is_an_error_on_every_rank(slurm):
    done = slurm.run("srun", "-N2", "-n2", *EXEC, "-np", "3", "--", "echo", "up")
    assert done.returncode != 0
    assert done.stdout.count("Slurm started 2 processes, but -np 3 asks for 3") == 2
    assert "up" not in done.stdout.splitlines()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_others_with_an_error(slurm, victim):
    done = slurm.run("srun", "-N2", "-n2", "--label", *TRAIN, victim)
    assert done.returncode != 0
    told = f"{1 - victim}: .*HorovodInternalError: .* rank {victim} does not answer"
    assert re.search(told, done.stdout), done.stdout
    await_end(slurm, str(WORKER))


def test_mpirun_over_nodes_has_a_file_in_the_home(slurm):
    command = ("mpirun", "--allow-run-as-root", "-np", "2", "--map-by", "node", *EXEC, "--")
    home = {"HOME": slurm.folder / "home"}
    done = slurm.run("salloc", "-N2", "-n2", *command, sys.executable, WORKER, variables=home)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"worker {rank} of 2, 0 of 1 here, sum 2" in done.stdout
    assert not [path for path in home["HOME"].rglob("*") if path.is_file()]


def test_a_cancelled_job_leaves_nothing(slurm):
    command = (*EXEC, "--", "sh", "-c", "echo up; exec sleep 83.5")
    job = slurm.start("srun", "-N2", "-n2", "--job-name=cancelled", *command)
    assert [job.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    slurm.run("scancel", "--name=cancelled")
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0, output
    await_end(slurm, "sleep 83.5")


@pytest.mark.parametrize("nodes", ["hva,hvb", "n[1-3,7],m", "r[0-1]n[08-11]"])
def test_lists_of_nodes_are_read_as_slurm_reads_them(nodes):
    done = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
    )
    assert list(expand(nodes)) == done.stdout.split()


def test_pods_of_an_indexed_job_find_pod_0_by_its_name(slurm):
    """The two nodes stand for pods: each has the host name and the index that Kubernetes gives."""
    words = (*EXEC, "-np", "2", "--", sys.executable, WORKER)
    pods = [
        slurm.start(*words, node=node, hostname=f"digits-{index}", JOB_COMPLETION_INDEX=index)
        for index, node in enumerate(slurm.addresses)
    ]
    for index, pod in enumerate(pods):
        output, _ = pod.communicate(timeout=90)
        assert pod.returncode == 0, output
        assert re.search(f"worker {index} of 2, 0 of 1 here, sum 2", output)


def test_pods_that_start_again_meet_again(slurm):
    """The first pod 0 leaves a server behind for some seconds, which takes nobody any more."""
    words = (*EXEC, "-np", "2", "--", "true")
    for _ in range(2):
        pods = [
            slurm.start(*words, node=node, hostname=f"digits-{index}", JOB_COMPLETION_INDEX=index)
            for index, node in enumerate(slurm.addresses)
        ]
        for pod in pods:
            output, _ = pod.communicate(timeout=90)
            assert (pod.returncode, output) == (0, "")


def await_end(slurm, text):
    """Wait until no process on the nodes has a text in its command line."""
    deadline = time.monotonic() + GONE_S
    while (left := slurm.find_processes(text)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
