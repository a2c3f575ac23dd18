"""docker/Dockerfile, built for real: what is in the image, and that it trains."""

from __future__ import annotations

import json
import time

import pytest

from tests.image.build import DECOY
from tests.image.conftest import Image
from tests.system.documents import take_block

TORCH = ("python", "examples/torch/digits.py", "--epochs", "1")
KERAS = ("python", "examples/tensorflow/digits_keras.py", "--epochs", "1")
THREADS = ("--env", "OMP_NUM_THREADS=1", "--env", "TF_CPP_MIN_LOG_LEVEL=3")
# Docker's default; a cluster on Kubernetes has it too.
SMALL = ("--shm-size=64m",)


def test_the_image_does_what_its_page_says(image: Image):
    _, doctor, train = take_block("docker/README.md", "docker build -f").commands

    done = image.engine.call(_share_network(doctor), 60)
    assert "No faults." in done.stdout
    assert "built against the torch that is" in done.stdout
    assert "/opt/hvdkit/bin/horovodrun" in done.stdout
    done = image.engine.call(_share_network(train), 240)
    assert "replicas identical: 2 worker(s)" in done.stdout


def _share_network(command: str) -> list[str]:
    """Let a command of the page use the host's network: the tests' engine has no other."""
    return command.replace("docker run", "docker run --network=host").split()


def test_the_doctor_finds_all_that_was_asked_for(image: Image):
    report = json.loads(
        image.engine.run(image.tag, "hvdkit", "doctor", "--json", options=SMALL).stdout
    )

    findings = {finding["topic"]: finding for finding in report["findings"]}
    assert [f for f in report["findings"] if f["level"] != "ok"] == [findings["shared memory"]]
    assert "64 MiB" in findings["shared memory"]["text"]
    assert set(report["frameworks"]) == {"torch", "tensorflow"}
    libraries = [f["text"] for f in report["findings"] if f["topic"] == "library"]
    assert len(libraries) == 2
    assert all("controllers gloo, mpi" in text for text in libraries)


@pytest.mark.parametrize(
    ("script", "controller", "user", "network"),
    [
        (TORCH, (), "1000", "host"),
        (TORCH, ("--gloo",), "root", "none"),
        (TORCH, ("--mpi",), "root", "none"),
        (KERAS, ("--gloo",), "1000", "host"),
        (KERAS, ("--mpi",), "1000", "host"),
    ],
)
def test_examples_train_with_two_workers(image: Image, script, controller, user, network):
    command = ("horovodrun", *controller, "-np", "2", *script)
    options = (*THREADS, *SMALL, f"--user={user}")
    done = image.engine.run(image.tag, *command, options=options, network=network, timeout_s=240)

    assert "2 worker(s) on cpu" in done.stdout
    assert "replicas identical: 2 worker(s)" in done.stdout
    # Open MPI complains so, about each message, where it may not read its neighbour's memory.
    assert "errno" not in done.stdout + done.stderr


def test_the_final_stage_can_compile_nothing(image: Image):
    names = "gcc g++ cc c++ cpp clang ld as make cmake mpicc mpicxx nvcc"
    done = image.engine.run(image.tag, "sh", "-c", f"command -v {names}; true", options=["-uroot"])

    assert done.stdout == ""
    leftovers = "find /var/lib/apt/lists /root/.cache /root/.local -type f 2>/dev/null; true"
    assert image.engine.run(image.tag, "sh", "-c", leftovers, options=["-uroot"]).stdout == ""


def test_an_ordinary_user_runs_it_and_can_write_its_results(image: Image):
    done = image.engine.run(image.tag, "sh", "-c", "id -u; pwd; touch result.json && ls result.*")

    assert done.stdout.split() == ["1000", "/workspace", "result.json"]
    assert _inspect(image)["Config"]["User"] == "1000:1000"


def test_no_secret_is_in_a_layer(image: Image):
    # All that the build was given, history included, and every file of the image.
    history = image.engine.docker("history", "--no-trunc", image.tag).stdout
    places = "/home /root /workspace /keys /usr/local /etc /var"
    own = "/opt/hvdkit/bin /opt/hvdkit/lib/python3*/site-packages/hvdkit"
    looking = f"""
        find / -xdev -name 'ssh_host_*'
        find {places} -name authorized_keys -o -name 'id_*'
        grep -rlsIE 'BEGIN [A-Z ]*PRIVATE KEY' {places}
        grep -rlsF {DECOY} {places} {own}
        true"""
    done = image.engine.run(image.tag, "bash", "-c", looking, options=["-uroot"])

    assert done.stdout == ""
    assert DECOY not in history


def test_nothing_but_sources_is_sent_to_the_engine(image: Image, tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM debian:bookworm-slim\nCOPY . /context\n")
    image.engine.docker(
        "build", "--file", str(dockerfile), "--tag", "context", str(image.context), timeout_s=120
    )
    done = image.engine.run("context", "grep", "-rl", DECOY[:-1], "/context", check=False)
    listing = image.engine.run("context", "ls", "-A", "/context").stdout.split()

    assert done.stdout == ""
    assert sorted(listing) == sorted(
        [
            "README.md",
            "constraints.txt",
            "docker",
            "examples",
            "hvdkit",
            "pyproject.toml",
            "setup.py",
        ]
    )


def test_labels_say_what_it_is(image: Image):
    labels = _inspect(image)["Config"]["Labels"]

    assert labels["org.opencontainers.image.title"] == "hvdkit"
    assert labels["org.opencontainers.image.version"] == image.version
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_a_container_at_work_is_healthy(image: Image):
    options = ("--detach", "--network=host", "--health-interval=1s")
    name = image.engine.docker("run", *options, image.tag, "sleep", "300").stdout.strip()
    try:
        health = {"Status": "starting"}
        deadline = time.monotonic() + 90
        while health["Status"] == "starting" and time.monotonic() < deadline:
            time.sleep(0.5)
            health = json.loads(
                image.engine.docker("inspect", "--format", "{{json .State.Health}}", name).stdout
            )
        assert health["Status"] == "healthy", health
        # And sick, once Horovod no longer fits what is installed.
        remove = "rm -r /opt/hvdkit/lib/python3*/site-packages/horovod"
        image.engine.docker("exec", "--user=root", name, "sh", "-c", remove)
        while health["Status"] != "unhealthy" and time.monotonic() < deadline:
            time.sleep(0.5)
            health = json.loads(
                image.engine.docker("inspect", "--format", "{{json .State.Health}}", name).stdout
            )
        assert health["Status"] == "unhealthy", health
    finally:
        image.engine.docker("rm", "--force", name)


def test_a_container_ends_when_it_is_told_to(image: Image):
    command = ("horovodrun", "--gloo", "-np", "2", *TORCH[:2], "--epochs", "100000")
    options = ("--detach", "--network=host", *THREADS)
    name = image.engine.docker("run", *options, image.tag, *command).stdout.strip()
    try:
        deadline = time.monotonic() + 120
        while "epoch  1" not in image.engine.docker("logs", name).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        image.engine.docker("stop", "--time=60", name, timeout_s=90)
        code = image.engine.docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout
        assert code.strip() != "137", "it had to be killed"
    finally:
        image.engine.docker("rm", "--force", name)


def _inspect(image: Image):
    return json.loads(image.engine.docker("inspect", image.tag).stdout)[0]
