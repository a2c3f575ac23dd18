"""docker/compose.yaml: two hosts with keys of their own making train together.

The same services, with the host's network and each on a loopback address of its own: the tests'
engine has no network that it could give to containers.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.image.conftest import Image
from tests.system.documents import take_block

ADDRESSES = {"a": "127.0.0.2", "b": "127.0.0.3", "train": "127.0.0.4"}
TRAIN_S = 300.0
Compose = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def compose(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """Give a function that runs a command of docker/README.md on these addresses."""
    override = tmp_path_factory.mktemp("compose") / "override.yaml"
    override.write_text(yaml.safe_dump({"services": _move_to_loopback()}), encoding="utf-8")

    def run(command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = command.split()
        place = words.index("-f")
        words[: place + 2] = [*_find_compose(), *words[place : place + 2], "-f", str(override)]
        words[words.index("docker/compose.yaml")] = str(image.context / "docker/compose.yaml")
        if "run" in words:  # nobody sits at a terminal
            words.insert(words.index("run") + 1, "-T")
        return image.engine.call(words, TRAIN_S, check)

    try:
        yield run
    finally:
        run("docker compose -f docker/compose.yaml down --volumes", check=False)


def _move_to_loopback() -> dict[str, object]:
    with socket.socket() as asker:
        asker.bind(("127.0.0.2", 0))
        port = asker.getsockname()[1]
    return {
        name: {
            "network_mode": "host",
            "extra_hosts": [f"{host}:{place}" for host, place in ADDRESSES.items()],
            "environment": {
                "HVDKIT_SSH_PORT": str(port),
                "HVDKIT_SSH_ADDRESS": address,
                "OMP_NUM_THREADS": "1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
        }
        for name, address in ADDRESSES.items()
    }


def _find_compose() -> list[str]:
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    return [shutil.which("docker-compose") or "docker-compose"]


def test_two_hosts_train_together(compose: Compose, image: Image):
    torch, keras, down = take_block("docker/README.md", "docker compose -f").commands

    for command in (torch, keras):
        done = compose(command)
        assert "2 worker(s) on cpu" in done.stdout, done.stderr
        assert "replicas identical: 2 worker(s)" in done.stdout, done.stderr
    _demand_hosts_of_their_own(compose)
    _demand_keys_for_nobody_else(compose)

    compose(down)
    assert image.engine.docker("ps", "--all", "--quiet").stdout == ""
    assert image.engine.docker("volume", "ls", "--quiet").stdout == ""


def _demand_hosts_of_their_own(compose: Compose) -> None:
    """Each worker ran where it was to run, over Open MPI's launcher too."""
    for controller in ("--gloo", "--mpi"):
        done = compose(
            "docker compose -f docker/compose.yaml run --rm train "
            f"horovodrun -np 2 -H a:1,b:1 {controller} hostname"
        )
        names = [line.split(":")[-1].strip() for line in done.stdout.splitlines() if ":" in line]
        assert sorted(n for n in names if n in ADDRESSES) == ["a", "b"], done.stdout + done.stderr


def _demand_keys_for_nobody_else(compose: Compose) -> None:
    exec_in_a = "docker compose -f docker/compose.yaml exec -T a "
    modes = compose(exec_in_a + "stat -c %a:%U /keys /keys/ready/user /keys/ready/host").stdout
    assert modes.split() == ["700:hvdkit", "600:hvdkit", "600:hvdkit"]
    # The keys of another cluster open nothing, and neither does a password.
    compose(exec_in_a + "ssh-keygen -q -t ed25519 -N x -f /tmp/other")
    refused = compose(
        exec_in_a + "ssh -F /dev/null -i /tmp/other -o BatchMode=yes -o StrictHostKeyChecking=no "
        f"-p {_port_of(compose, exec_in_a)} b true",
        check=False,
    )
    assert refused.returncode != 0
    assert "Permission denied" in refused.stdout + refused.stderr


def _port_of(compose: Compose, exec_in_a: str) -> str:
    return compose(exec_in_a + "printenv HVDKIT_SSH_PORT").stdout.strip()


def test_keys_that_cannot_be_kept_are_one_error(image: Image):
    options = ("--entrypoint=ssh-host", "--tmpfs=/keys:mode=755")
    done = image.engine.run(image.tag, options=options, check=False)

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "ssh-host: /keys is not a folder that user 1000 may write to: mount one there"
    ]


def test_the_file_names_no_network_of_the_tests(image: Image):
    text = Path(image.context, "docker/compose.yaml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]

    assert set(services) == set(ADDRESSES)
    assert not any("network_mode" in service for service in services.values())
