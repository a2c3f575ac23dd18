"""Keepers find their driver, obey it, and leave nothing behind; no framework is needed."""

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from hvdkit.bench import crew as crews
from hvdkit.bench.crew import Crew
from hvdkit.bench.keeper import KEY_VARIABLE
from hvdkit.errors import HvdkitError


def start_keeper(crew, port, folder, rank=0, size=1):
    """Start a real keeper that connects to a crew; what it leaves behind is in ``folder``."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    place = {
        f"HOROVOD_{name}": str(value)
        for name, value in zip(names, (rank, size, rank, size), strict=True)
    }
    return subprocess.Popen(
        [sys.executable, "-m", "hvdkit.bench.keeper", "--driver", f"127.0.0.1:{port}"],
        env={**os.environ, **place, KEY_VARIABLE: crew.key.hex(), "TMPDIR": str(folder)},
    )


def test_who_has_no_key_is_no_keeper(tmp_path):
    refused = []

    def intrude(port):
        try:
            Client(("127.0.0.1", port), authkey=b"guessed")
        except AuthenticationError as error:
            refused.append(error)

    with Crew(1) as crew:
        port = crew.listen("127.0.0.1")
        intruder = threading.Thread(target=intrude, args=(port,))
        intruder.start()
        # One that goes without a word.
        socket.create_connection(("127.0.0.1", port)).close()
        keeper = start_keeper(crew, port, tmp_path)
        crew.assemble("127.0.0.1")
        intruder.join(30)
        assert len(refused) == 1
        assert crew.hosts == [socket.gethostname()]
    assert keeper.wait(30) == 0
    assert not list(tmp_path.iterdir())


def test_who_says_nothing_does_not_hold_up_the_keepers(tmp_path, monkeypatch):
    monkeypatch.setattr(crews, "HELLO_S", 1)
    with Crew(1) as crew:
        port = crew.listen("127.0.0.1")
        with socket.create_connection(("127.0.0.1", port)):
            start_keeper(crew, port, tmp_path)
            crew.assemble("127.0.0.1")
        assert crew.hosts == [socket.gethostname()]


def test_a_keeper_that_is_told_to_end_takes_its_folder_along(tmp_path):
    with Crew(1) as crew:
        keeper = start_keeper(crew, crew.listen("127.0.0.1"), tmp_path)
        crew.assemble("127.0.0.1")
        assert len(list(tmp_path.iterdir())) == 1
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_keepers_are_let_go_when_some_do_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(crews, "ASSEMBLE_S", 5)
    with Crew(2) as crew:
        keeper = start_keeper(crew, crew.listen("127.0.0.1"), tmp_path, size=2)
        with pytest.raises(HvdkitError, match="1 of 2 workers' keepers were there after 5 s"):
            crew.assemble("127.0.0.1")
        # Before the crew's own end, which waits for those who started the keepers.
        assert keeper.wait(30) == 0


def test_other_hosts_are_not_told_an_address_of_this_host_alone(tmp_path):
    with Crew(1) as crew:
        keeper = start_keeper(crew, crew.listen("127.0.0.1"), tmp_path)
        crew.assemble("head-node")
        crew._teams[1] = "a team"
        (address,) = crew._reserve_ports(1, 1)
        host, _, port = address.partition(":")
        assert host == "head-node"
        assert 0 < int(port) < 1 << 16
    assert keeper.wait(30) == 0


@pytest.mark.parametrize("hosts", ["localhost:2", f"{socket.gethostname()}:4", "127.0.0.1:1"])
def test_this_host_by_any_name_needs_no_network(hosts):
    assert crews._find_own_address(hosts) == "127.0.0.1"


def test_a_host_that_is_unknown_is_named():
    with pytest.raises(HvdkitError, match=r"cannot reach no-such-host\.invalid: "):
        crews._find_own_address("localhost:2,no-such-host.invalid:2")
