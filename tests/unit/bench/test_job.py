"""Where rank 0 of a running job leaves word for the others."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hvdkit.bench.job import join, open_board
from hvdkit.errors import HvdkitError

SLURM = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return open_board(SLURM)


def test_word_is_left_read_by_its_owner_alone_and_taken_away(board, tmp_path):
    assert board.read() is None
    board.write("here")
    assert board.read() == "here"
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert path.stat().st_mode & 0o777 == 0o600
    board.clear()
    board.clear()
    assert board.read() is None


def test_jobs_do_not_share_a_board(board):
    other = open_board({**SLURM, "SLURM_STEP_ID": "2"})
    board.write("here")
    assert other.read() is None


def test_no_board_outside_of_a_job():
    assert open_board({}) is None
    # A batch script has a rank, and runs once.
    assert open_board({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None


def test_a_launcher_without_a_board_is_refused():
    with pytest.raises(HvdkitError, match="cannot run inside a job of MPICH: start it with"):
        open_board({"PMI_RANK": "0"})


def test_a_rank_0_that_is_gone_is_named(board):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    board.write(f'{{"address": "127.0.0.1", "port": {port}, "key": "00"}}')
    with pytest.raises(HvdkitError, match=f"cannot reach rank 0 at 127.0.0.1:{port}"):
        join(board)


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *words):
        pass


def test_no_proxy_comes_between_a_rank_and_its_launcher(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        board = open_board(
            {
                "HOROVOD_RANK": "1",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
            }
        )
        try:
            assert board.read() == "/hvdkit-bench/driver"
        finally:
            server.shutdown()
            serving.join()
