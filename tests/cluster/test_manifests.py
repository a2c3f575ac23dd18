"""The Kubernetes manifests of examples/cluster, against their schemas and with themselves."""

import shlex

import jsonschema
import kubernetes_validate
import pytest
import yaml

from hvdkit.cli import main
from tests.system.command import ROOT

FOLDER = ROOT / "examples" / "cluster"
VERSIONS = ("1.28.0", kubernetes_validate.latest_version())


def some(**properties):
    """Return the schema of an object that has no other properties."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


NUMBER = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
REPLICA = some(
    replicas=NUMBER,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template={"type": "object"},  # a pod's, for which Kubernetes has a schema
)
# The fields of the operator's resource, in its version 0.6. Source: manifests/base/
# kubeflow.org_mpijobs.yaml in github.com/kubeflow/mpi-operator.
MPI_JOB = some(
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata={"type": "object", "required": ["name"]},
    spec=some(
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        mpiReplicaSpecs={
            **some(Launcher=REPLICA, Worker=REPLICA),
            "required": ["Launcher", "Worker"],
        },
        runLauncherAsWorker={"type": "boolean"},
        runPolicy=some(
            activeDeadlineSeconds=NUMBER,
            backoffLimit=NUMBER,
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            managedBy=TEXT,
            schedulingPolicy={"type": "object"},
            suspend={"type": "boolean"},
            ttlSecondsAfterFinished=NUMBER,
        ),
        slotsPerWorker=NUMBER,
        sshAuthMountPath=TEXT,
    ),
)


def load(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_indexed_job_fits_kubernetes(version):
    for part in load("indexed_job.yaml"):
        kubernetes_validate.validate(part, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_mpi_job_fits_the_operator_and_its_pods_kubernetes(version):
    (job,) = load("mpijob.yaml")
    jsonschema.validate(job, MPI_JOB)
    for replica in job["spec"]["mpiReplicaSpecs"].values():
        template = {"metadata": {"name": "pod"}, "template": replica["template"]}
        part = {"apiVersion": "v1", "kind": "PodTemplate", **template}
        kubernetes_validate.validate(part, version, strict=True)


def test_a_wrong_manifest_does_not_fit():
    service, job = load("indexed_job.yaml")
    job["spec"]["template"]["spec"]["containers"][0]["image"] = 7
    service["spec"]["ports_"] = []
    for part in (service, job):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(part, VERSIONS[0], strict=True)
    (job,) = load("mpijob.yaml")
    job["spec"]["slots"] = 2
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, MPI_JOB)


def test_pods_find_each_other_and_are_as_many_as_hvdkit_exec_is_told():
    service, job = load("indexed_job.yaml")
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    command, subcommand, *arguments = pod["containers"][0]["args"]
    assert command == "hvdkit"
    context = main.get_command(None, subcommand).make_context(subcommand, arguments)
    assert context.params["size"] == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert context.params["command"][0] == "python"


def test_mpirun_starts_a_worker_in_each_slot():
    (job,) = load("mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    arguments = replicas["Launcher"]["template"]["spec"]["containers"][0]["args"]
    slots = replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    assert arguments[arguments.index("-np") + 1] == str(slots)


def test_the_mpi_jobs_commands_train(slurm):
    """On two nodes that stand for pods, with keys where the test put them."""
    (job,) = load("mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    key = slurm.folder / "mpijob"
    slurm.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    *shell, script = replicas["Worker"]["template"]["spec"]["containers"][0]["args"]
    workers = []
    for node in slurm.addresses:
        own = script.replace("/tmp/ssh", str(slurm.folder / f"ssh-{node}")).rstrip()
        workers.append(slurm.start(*shell, f"{own} -o AuthorizedKeysFile={key}.pub", node=node))
    arguments = replicas["Launcher"]["template"]["spec"]["containers"][0]["args"]
    at = arguments.index("plm_rsh_args") + 1
    arguments[at] += f" -i {shlex.quote(str(key))}"
    arguments[arguments.index("--epochs") + 1] = "1"
    operator = {  # what it sets in the launcher
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": slurm.folder / "hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_ALLOW_RUN_AS_ROOT": 1,
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1,
    }
    slots = job["spec"]["slotsPerWorker"]
    hosts = "".join(f"{node} slots={slots}\n" for node in slurm.addresses)
    (slurm.folder / "hostfile").write_text(hosts)
    try:
        done = slurm.run(*arguments, variables=operator)
        assert done.returncode == 0, done.stdout
        assert "replicas identical: 2 worker(s) hold the same weights" in done.stdout
    finally:
        for worker in workers:
            worker.terminate()
            worker.communicate(timeout=30)
