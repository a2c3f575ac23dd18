"""Which rank of which job a process is, and where rank 0 can be found."""

import socket

import pytest

from hvdkit.errors import EnvironmentMismatchError
from hvdkit.launch.job import find_job, parse_server

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
ON_ONE_NODE = {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "4711",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
SERVER = ("a", 5000)


def test_a_slurm_step_over_nodes():
    job = find_job(SLURM)
    assert (job.rank, job.size, job.hosts, job.kind) == (3, 4, ("n1",), "Slurm")
    assert all(20_000 <= port < 30_000 for port in job.ports)
    assert len(job.ports) > 1


def test_ranks_agree_on_key_and_ports_and_jobs_do_not():
    job, other_rank = find_job(SLURM), find_job({**SLURM, "SLURM_PROCID": "2"})
    assert (job.key, job.ports) == (other_rank.key, other_rank.ports)
    for change in ({"SLURM_JOB_ID": "18"}, {"SLURM_STEP_ID": "1"}):
        other = find_job(SLURM | change)
        assert other.key != job.key
        assert other.ports != job.ports


def test_on_one_node_loopback_is_enough():
    assert find_job(SLURM | ON_ONE_NODE).hosts == ("127.0.0.1",)
    assert find_job(SLURM | ON_ONE_NODE, server=SERVER).hosts == ("a",)


def test_the_user_may_say_where():
    job = find_job(SLURM, server=SERVER)
    assert (job.hosts, job.ports) == (("a",), (5000,))
    assert find_job(SLURM, server=("a", None)).ports == find_job(SLURM).ports


def test_open_mpi_over_hosts_leaves_word_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    job = find_job(OPEN_MPI)
    assert job.hosts == ()
    assert job.board is not None
    assert job.board.path != find_job(OPEN_MPI | {"PMIX_NAMESPACE": "4712"}).board.path
    assert find_job(OPEN_MPI, server=SERVER).board is None


def test_mpich_over_hosts_asks_for_the_host():
    with pytest.raises(EnvironmentMismatchError, match=r"MPICH does not tell .* --rendezvous HOST"):
        find_job(MPICH)
    assert find_job(MPICH, server=SERVER).hosts == ("a",)


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI, MPICH])
def test_another_size_than_the_jobs_is_an_error(variables):
    size = find_job(variables, server=SERVER).size
    find_job(variables, size, server=SERVER)
    with pytest.raises(EnvironmentMismatchError, match=f"started {size} processes, but -np 9"):
        find_job(variables, 9, server=SERVER)


@pytest.mark.parametrize(
    ("full", "short", "hosts"),
    [
        ("train-2.train.ns.svc", "train-2", ("train-0.train.ns.svc", "train-0")),
        ("train-2", "train-2", ("train-0",)),
    ],
)
def test_an_indexed_job_names_its_pods(full, short, hosts, monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: full)
    monkeypatch.setattr(socket, "gethostname", lambda: short)
    job = find_job({"JOB_COMPLETION_INDEX": "2"}, 3)
    assert (job.rank, job.size, job.hosts) == (2, 3, hosts)
    with pytest.raises(EnvironmentMismatchError, match="not JOB-1"):
        find_job({"JOB_COMPLETION_INDEX": "1"}, 3)
    assert find_job({"JOB_COMPLETION_INDEX": "1"}, 3, server=SERVER).hosts == ("a",)


@pytest.mark.parametrize(
    ("index", "size", "message"),
    [("2", None, "-np N"), ("2", 2, "does not fit -np 2"), ("two", 3, "not a number")],
)
def test_an_indexed_job_that_does_not_fit(index, size, message):
    with pytest.raises(EnvironmentMismatchError, match=message):
        find_job({"JOB_COMPLETION_INDEX": index}, size, server=SERVER)


def test_options_for_other_schedulers():
    job = find_job({}, 4, 3, SERVER)
    assert (job.rank, job.size, job.hosts, job.ports) == (3, 4, ("a",), (5000,))
    # Rank 0 may know its host by another name.
    assert find_job({}, 4, 0, ("localhost", 5000)).key == job.key
    assert find_job({}, 4, 0, ("a", 5001)).key != job.key
    for size, server in ((None, SERVER), (4, None)):
        with pytest.raises(EnvironmentMismatchError, match="--rank needs -np and --rendezvous"):
            find_job({}, size, 3, server)
    with pytest.raises(EnvironmentMismatchError, match="--rank is 4, which does not fit -np 4"):
        find_job({}, 4, 4, SERVER)


def test_within_horovodrun_it_is_refused():
    with pytest.raises(EnvironmentMismatchError, match="HOROVOD_RANK=1 is set: horovodrun"):
        find_job({**SLURM, "HOROVOD_RANK": "1"})


def test_without_a_scheduler_it_is_refused():
    with pytest.raises(EnvironmentMismatchError, match="Nothing says which rank"):
        find_job({})
    with pytest.raises(EnvironmentMismatchError, match="srun hvdkit exec"):
        find_job({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0"})


def test_where_the_server_is():
    assert parse_server("n1.cluster:1234") == ("n1.cluster", 1234)
    assert parse_server("10.0.0.1") == ("10.0.0.1", None)
    for text in ("", ":1", "a:", "a:b", "a:0", "a:65536", "a b", "::1"):
        with pytest.raises(ValueError):  # noqa: PT011  (any)
            parse_server(text)
