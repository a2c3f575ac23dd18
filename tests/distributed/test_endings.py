"""A job that ends, loses a rank or starts anew: what `hvdkit install` mends in Horovod."""

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from tests.distributed.launch import WorkerRun, launch
from tests.system.command import find_processes_naming, make_environment

WORKER = Path(__file__).with_name("worker_endings.py")


def run(mode: str, **env: str) -> WorkerRun:
    return launch(WORKER, args=[mode], env=env, timeout_s=60)


def test_horovod_starts_again_and_again():
    done = run("restart")
    assert done.exit_code == 0, done.explain("a restart failed")
    assert all(f"rank {rank} restarted" in done.output for rank in range(2))


def test_old_addresses_are_forgotten_in_whatever_order_ranks_finish():
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts("localhost:2"), 2))

    def send(method: str, scope: str, rank: int) -> None:
        url = f"http://localhost:{port}/{scope}/{rank}"
        data = b"address" if method == "PUT" else None
        urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=10).close()

    try:
        for scope in ("global", "local_localhost"):
            send("PUT", scope, 0)
        send("DELETE", "global", 0)
        send("DELETE", "local_localhost", 0)  # rank 0 is ahead
        send("DELETE", "global", 1)
        send("DELETE", "local_localhost", 1)
        for scope in ("global", "local_localhost"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                send("GET", scope, 0)
    finally:
        server.stop()


def test_with_process_sets_a_lost_rank_is_an_error_on_the_others():
    done = run("lose_a_rank")
    assert done.exit_code not in (0, None), done.explain("the job should have failed by itself")
    assert "rank 0 was told" in done.output, done.explain("aborted instead of raising")


def test_children_of_a_lost_rank_do_not_stay():
    done = run("leave_a_child")
    assert done.exit_code not in (0, None), done.explain("the job should have failed by itself")
    assert not find_processes_naming("61.25")


def test_a_rank_may_join_while_horovod_tunes_itself():
    done = run("join_while_tuning", HOROVOD_AUTOTUNE="1")
    assert done.exit_code == 0, done.explain("join failed")
    assert all(f"rank {rank} joined" in done.output for rank in range(2))


def test_a_process_may_exit_while_a_thread_waits():
    done = run("exit_while_a_thread_waits")
    assert done.exit_code == 0, done.explain("the exit hangs")


def test_a_worker_that_never_comes_is_an_error_on_the_others():
    done = run("start_without_a_peer", HOROVOD_GLOO_TIMEOUT_SECONDS="3")
    assert done.exit_code not in (0, None), done.explain("the job should have failed by itself")
    told = "rank 0 was told: Horovod could not be initialized: "
    assert told in done.output, done.explain("aborted instead of raising")
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS (3 s)" in done.output


def test_a_launcher_that_is_gone_is_an_error():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    place = {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2, "CROSS_RANK": 0}
    done = subprocess.run(
        [sys.executable, WORKER, "start_without_a_server"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=make_environment(
            **{f"HOROVOD_{name}": value for name, value in place.items()},
            HOROVOD_CROSS_SIZE=1,
            HOROVOD_CONTROLLER="gloo",
            HOROVOD_CPU_OPERATIONS="gloo",
            HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
            HOROVOD_GLOO_RENDEZVOUS_PORT=port,
            HOROVOD_GLOO_IFACE="lo",
        ),
    )
    assert f"the launcher at 127.0.0.1:{port}" in done.stdout, done.stderr
    assert "started alone" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_no_workers_are_refused():
    horovodrun = Path(sys.executable).with_name("horovodrun")
    done = subprocess.run(
        [horovodrun, "-np", "0", "--gloo", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "-np must be at least 1, got 0" in done.stderr
