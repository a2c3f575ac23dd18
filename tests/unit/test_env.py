"""A process's place among the workers, from the variables of each launcher."""

import pytest

from hvdkit import env
from hvdkit.errors import EnvironmentMismatchError, HvdkitError

HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
}
LAUNCHERS = {
    "horovodrun": HOROVODRUN,
    "Open MPI": OPEN_MPI,
    "MPICH": MPICH,
    "Slurm": SLURM,
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_launcher(name):
    variables = LAUNCHERS[name]
    assert env.place(variables) == env.Place(name, 3, 4, 1, 2)
    assert env.launcher(variables) == name
    assert env.rank(variables) == 3
    assert env.size(variables) == 4
    assert env.local_rank(variables) == 1
    assert env.local_size(variables) == 2


def test_the_process_environment_is_the_default(monkeypatch):
    for variables in LAUNCHERS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    assert env.launcher() is None
    for name, value in HOROVODRUN.items():
        monkeypatch.setenv(name, value)
    assert env.rank() == 3


def test_no_launcher_is_an_error_and_never_rank_0():
    for ask in (env.place, env.rank, env.size, env.local_rank, env.local_size):
        with pytest.raises(EnvironmentMismatchError, match=r"horovodrun -np 2"):
            ask({"PATH": "/bin"})


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_lost_variable_is_named(name):
    variables = LAUNCHERS[name]
    # What Slurm's task is recognized by are two.
    for lost in list(variables)[2 if name == "Slurm" else 1 :]:
        remaining = {key: value for key, value in variables.items() if key != lost}
        with pytest.raises(EnvironmentMismatchError, match=lost):
            env.place(remaining)


def test_the_innermost_launcher_wins():
    # horovodrun inside an allocation: Slurm says that the batch script is rank 0 of 1.
    outer = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    assert env.rank({**outer, **HOROVODRUN}) == 3
    assert env.rank({**outer, **OPEN_MPI}) == 3


# The shell of salloc has a step of its own, with a number that no step of srun has.
@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_batch_script_has_no_rank(step):
    # Slurm gives it a rank and the size of the job, though it runs once.
    script = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}
    script |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "17", **step}
    assert env.launcher(script) is None
    with pytest.raises(EnvironmentMismatchError, match=r"job 17, but is no task .* srun hvdkit"):
        env.rank(script)
    assert env.rank(script | OPEN_MPI) == 3


def test_slurm_that_speaks_pmi2_is_not_mpich():
    assert env.place(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "Slurm"
    # MPICH's mpiexec starts its helpers by srun, and those the workers.
    helper = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert env.place(helper | MPICH) == env.Place("MPICH", 3, 4, 1, 2)


@pytest.mark.parametrize("value", ["", "one", "1.0"])
def test_what_is_not_a_number_is_named(value):
    with pytest.raises(EnvironmentMismatchError, match="HOROVOD_RANK"):
        env.rank({**HOROVODRUN, "HOROVOD_RANK": value})


@pytest.mark.parametrize(
    "changes",
    [
        {"HOROVOD_RANK": "4"},
        {"HOROVOD_RANK": "-1"},
        {"HOROVOD_SIZE": "0"},
        {"HOROVOD_LOCAL_RANK": "2"},
        {"HOROVOD_LOCAL_SIZE": "5"},
    ],
)
def test_contradictions_are_errors(changes):
    with pytest.raises(EnvironmentMismatchError, match="left over from another launch"):
        env.place({**HOROVODRUN, **changes})


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [("4", "0", 4), ("2(x3),1", "2", 2), ("2(x3),1", "3", 1), ("1,3", "1", 3)],
)
def test_slurm_tasks_of_this_node(tasks, node, expected):
    variables = {
        **SLURM,
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "0",
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": node,
    }
    assert env.local_size(variables) == expected


def test_slurm_step_counts_before_the_job():
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "64"}
    assert env.size(step) == 4


@pytest.mark.parametrize("tasks", ["two", "2(y3)", ""])
def test_slurm_list_that_is_none(tasks):
    with pytest.raises(EnvironmentMismatchError, match="SLURM_TASKS_PER_NODE"):
        env.place({**SLURM, "SLURM_TASKS_PER_NODE": tasks})


def test_slurm_node_outside_the_list():
    with pytest.raises(EnvironmentMismatchError, match="SLURM_NODEID=7"):
        env.place({**SLURM, "SLURM_NODEID": "7"})


def test_a_process_without_a_launcher_may_start_alone():
    env.check_launch({"PATH": "/bin"})
    env.check_launch(HOROVODRUN)


@pytest.mark.parametrize(
    "environ",
    [
        {"HOROVOD_RANK": "1"},
        {"HOROVOD_SIZE": "2"},
        HOROVODRUN | {"HOROVOD_RANK": "4"},
        HOROVODRUN | {"HOROVOD_SIZE": "two"},
    ],
)
def test_half_a_launch_is_an_error_before_horovod_starts(environ):
    with pytest.raises(EnvironmentMismatchError):
        env.check_launch(environ)


RENDEZVOUS = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4567",
}


def test_workers_that_do_not_find_each_other_are_told_what_to_look_at():
    told = pytest.raises(HvdkitError, match=r"\(30 s\) .* launcher at 10\.0\.0\.1:4567")
    with told, env.explain_failed_init(RENDEZVOUS):
        raise ValueError("Horovod could not be initialized: timed out")


@pytest.mark.parametrize("environ", [RENDEZVOUS, {}])
def test_other_errors_of_init_stay(environ):
    with pytest.raises(ValueError, match=r"^mpi4py is missing$"), env.explain_failed_init(environ):
        raise ValueError("mpi4py is missing")


@pytest.mark.parametrize(("value", "elastic"), [("1", True), ("0", False), (None, False)])
def test_elastic_jobs_are_told_by_horovods_variable(value, elastic):
    assert env.is_elastic({} if value is None else {"HOROVOD_ELASTIC": value}) is elastic


OF_GLOO = HOROVODRUN | {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
    "HOROVOD_CONTROLLER": "gloo",
}


@pytest.mark.parametrize(
    "lost",
    [
        *([variable] for variable in OF_GLOO),
        ["HOROVOD_RANK", "HOROVOD_SIZE"],
        list(HOROVODRUN),
    ],
)
def test_a_worker_that_lost_variables_does_not_train_alone(lost):
    env.check_launch(OF_GLOO)
    remaining = {name: value for name, value in OF_GLOO.items() if name not in lost}
    with pytest.raises(EnvironmentMismatchError, match=f"but not {', '.join(lost)}"):
        env.check_launch(remaining)


@pytest.mark.parametrize(
    "variable", ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"]
)
@pytest.mark.parametrize("text", ["soon", "", "-1", "1.5"])
def test_limits_are_whole_numbers(variable, text):
    env.check_launch({variable: "60"})
    with pytest.raises(EnvironmentMismatchError, match=variable):
        env.check_launch({variable: text})


@pytest.mark.parametrize(
    ("environ", "mpi_built"),
    [
        ({}, True),
        ({}, False),
        ({"HOROVOD_CPU_OPERATIONS": "gloo"}, False),
        ({"HOROVOD_CONTROLLER": "GLOO", "HOROVOD_CPU_OPERATIONS": "Gloo"}, True),
        ({"HOROVOD_CPU_OPERATIONS": "CCL"}, True),
    ],
)
def test_libraries_that_work_together(environ, mpi_built):
    env.check_launch(environ, mpi_built=mpi_built)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"HOROVOD_CPU_OPERATIONS": "gloo"}, "under the MPI controller"),
        ({"HOROVOD_CONTROLLER": "MPI", "HOROVOD_CPU_OPERATIONS": "GLOO"}, "horovodrun --gloo"),
        ({"HOROVOD_CONTROLLER": "nccl"}, "HOROVOD_CONTROLLER='nccl' is not one of mpi, gloo"),
        ({"HOROVOD_CPU_OPERATIONS": ""}, "HOROVOD_CPU_OPERATIONS='' is not one of"),
    ],
)
def test_libraries_that_do_not(environ, named):
    with pytest.raises(EnvironmentMismatchError, match=named):
        env.check_launch(environ, mpi_built=True)
