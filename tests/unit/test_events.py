"""Where events go: real files, a real endpoint, Python logging; TensorBoard by a writer given."""

import json
import logging
import os
import socket
import subprocess
import sys
import urllib.request
from datetime import datetime, timedelta, timezone

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.events import EventLog


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def be_rank(monkeypatch, rank, size=4):
    for name, value in {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))


def read(path):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_an_event_is_a_line_at_once(tmp_path):
    path = tmp_path / "new" / "events.jsonl"
    log = EventLog(path)
    log.emit("straggler", "rank 2 is slow", step=7, rank=2, factor=1.5, times=(1, float("nan")))
    [event] = read(path)
    written = datetime.fromisoformat(event.pop("time"))
    assert written.utcoffset() == timedelta(0)
    assert abs(datetime.now(timezone.utc) - written) < timedelta(minutes=5)
    assert event == {
        "kind": "straggler",
        "severity": "warning",
        "step": 7,
        "rank": 2,
        "message": "rank 2 is slow",
        "details": {"factor": 1.5, "times": [1, "nan"]},
    }
    log.close()
    with EventLog(path) as again:
        again.emit("rollback", "went back", severity="error")
    assert [event["kind"] for event in read(path)] == ["straggler", "rollback"]


def test_each_rank_has_a_file_of_its_own(tmp_path, monkeypatch):
    for rank in (0, 3):
        be_rank(monkeypatch, rank)
        with EventLog(tmp_path / "events.jsonl", prometheus_port=0) as log:
            log.emit("nonfinite", f"seen by {rank}")
            assert (log.prometheus_port is None) == (rank != 0)
    assert read(tmp_path / "events.jsonl")[0]["message"] == "seen by 0"
    assert read(tmp_path / "events.rank3.jsonl")[0]["message"] == "seen by 3"


def test_processes_with_one_file_never_garble_it(tmp_path):
    """Ranks of an elastic job may come to share one."""
    path = tmp_path / "events.jsonl"
    script = (
        "import sys; from hvdkit.events import EventLog\n"
        f"log = EventLog({str(path)!r})\n"
        "for i in range(200): log.emit('nonfinite', sys.argv[1] * 3000, severity='info')"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, letter]) for letter in "ab"]
    assert [process.wait(60) for process in processes] == [0, 0]
    messages = [event["message"] for event in read(path)]
    assert sorted(set(messages)) == ["a" * 3000, "b" * 3000]
    assert len(messages) == 400


def test_events_reach_python_logging(caplog):
    with caplog.at_level(logging.INFO, logger="hvdkit"):
        log = EventLog()
        log.emit("loss_spike", "the loss rose", step=3, severity="info")
        log.emit("rollback", "gone back", severity="error")
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("hvdkit", logging.INFO, "loss_spike: step 3: the loss rose"),
        ("hvdkit", logging.ERROR, "rollback: gone back"),
    ]
    with pytest.raises(ValueError, match="info, warning, error"):
        log.emit("rollback", "x", severity="fatal")


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "events.jsonl"):
        with pytest.raises(HvdkitError, match=r"cannot write events to .*: \w+"):
            EventLog(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_training(caplog):
    log = EventLog("/dev/full")
    for _ in range(3):
        log.emit("nonfinite", "skipped")
    complaints = [r.getMessage() for r in caplog.records if "no longer" in r.getMessage()]
    assert len(complaints) == 1
    assert "No space left" in complaints[0]


def test_prometheus_serves_counts_and_figures():
    with EventLog(prometheus_port=0) as log:
        log.emit("nonfinite", "skipped")
        log.emit("nonfinite", "skipped")
        log.record(4, 1, {"step_time_seconds": 0.25, "wait_share": 0.5})
        log.record(5, 1, {"step_time_seconds": 0.75})
        url = f"http://127.0.0.1:{log.prometheus_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
    assert 'hvdkit_events_total{kind="nonfinite",severity="warning"} 2.0' in text
    assert 'hvdkit_step_time_seconds{rank="1"} 0.75' in text
    assert 'hvdkit_wait_share{rank="1"} 0.5' in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=30)


def test_a_port_in_use_is_an_error_that_names_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HvdkitError, match=rf"127\.0\.0\.1:{port}: .*in use.*another"):
            EventLog(tmp_path / "events.jsonl", prometheus_port=port)


def test_a_writer_of_tensorboard_gets_events_and_figures():
    class Writer:
        def __init__(self):
            self.seen = []

        def add_text(self, *args):
            self.seen.append(args)

        add_scalar = add_text

        def flush(self):
            pass

    writer = Writer()
    with EventLog(tensorboard=writer) as log:
        log.emit("straggler", "rank 1 is slow", step=9)
        log.record(9, 1, {"loss": 2.0})
    assert writer.seen == [
        ("hvdkit/straggler", "rank 1 is slow", 9),
        ("hvdkit/loss/1", 2.0, 9),
    ]
    with pytest.raises(HvdkitError, match="must be a directory"):
        EventLog(tensorboard=object())


def test_tensorboard_that_is_not_installed_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(HvdkitError, match="pip install tensorboard"):
        EventLog(tensorboard=tmp_path)
