"""`hvdkit exec`, as mpirun starts it, and as a scheduler that hvdkit does not know would."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.system.command import ROOT, make_environment
from tests.system.documents import take_inline

WORKER = Path(__file__).with_name("exec_worker.py")
EXEC = (sys.executable, "-m", "hvdkit.cli", "exec")
MARK = "HVDKIT_TEST_JOB"
DEADLINE_S = 90
GONE_S = 20


class Job:
    """Processes that share a mark, by which those that they leave behind are found."""

    def __init__(self):
        self.mark = uuid.uuid4().hex
        self.processes = []

    def start(self, *command, stdin=subprocess.DEVNULL, **variables):
        environment = make_environment(
            OMP_NUM_THREADS="1", MASTER_SECRET="open-sesame", **{MARK: self.mark}, **variables
        )
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def start_ranks(self, size, *command, options=(), **variables):
        """Start each rank as an unknown scheduler does, with its place in options."""
        server = f"127.0.0.1:{find_port()}"
        for rank in range(size):
            place = ("--rank", rank, "-np", size, "--rendezvous", server)
            self.start(*EXEC, *place, *options, "--", *command, **variables)
        return self.processes

    def find_processes(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def await_end(self):
        """Wait until no process is left, and demand that it comes to that."""
        deadline = time.monotonic() + GONE_S
        while (left := self.find_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left

    def end(self):
        for process in self.find_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes:
            process.communicate()


@pytest.fixture
def job():
    job = Job()
    yield job
    job.end()


def find_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def finish(process):
    """Return the exit code and the output of a process."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def mpirun(*command):
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("mpirun is not installed (Debian: apt-get install openmpi-bin)")
    allowed = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [program, *allowed, "--oversubscribe", "-np", "2", *command]


def test_mpirun_trains_an_example_by_gloo(job):
    page = take_inline("README.md", "mpirun -np 4 --bind-to none hvdkit exec -- python train.py")
    _, _, _, *options, _, _, _, _, _ = page.split()
    example = ROOT / "examples" / "torch" / "digits.py"
    command = [*EXEC, "-np", "2", "--", sys.executable, example, "--epochs", "1"]
    code, output = finish(job.start(*mpirun(*options, *command)))
    assert code == 0, output
    assert "replicas identical: 2 worker(s) hold the same weights" in output


def test_another_number_than_mpirun_started_is_an_error_on_every_rank(job):
    code, output = finish(job.start(*mpirun(*EXEC, "-np", "3", "--", "echo", "started")))
    assert code != 0
    assert "Open MPI started 2 processes, but -np 3 asks for 3" in output
    assert "started" not in output.splitlines()


def find_mpiexec():
    for name in ("mpiexec.hydra", "mpiexec.mpich"):
        if program := shutil.which(name):
            return program
    return pytest.skip("mpiexec.hydra is not installed (Debian: apt-get install mpich)")


def test_mpich_starts_workers_too(job):
    command = [find_mpiexec(), "-n", "2", *EXEC, "--", sys.executable, WORKER]
    code, output = finish(job.start(*command))
    assert code == 0, output
    assert "worker 1 of 2, 1 of 2 here, sum 2" in output


def test_an_indexed_jobs_pods_meet(job):
    options = ("-np", 3, "--rendezvous", f"127.0.0.1:{find_port()}")
    for rank in range(3):
        job.start(*EXEC, *options, "--", sys.executable, WORKER, JOB_COMPLETION_INDEX=rank)
    for rank, process in enumerate(job.processes):
        code, output = finish(process)
        assert code == 0, output
        assert f"worker {rank} of 3, {rank} of 3 here, sum 3" in output


def test_the_process_becomes_the_command(job):
    """Its input, output, exit code and signals are the command's; it has no child of another's."""
    code = (
        "import os, sys, subprocess; print(sys.stdin.read(), os.getpid(), sys.argv[1:]);"
        "print(os.environ['PYTHONUNBUFFERED'], os.environ['HOROVOD_CONTROLLER']);"
        "print(subprocess.run('kill -PIPE $$', shell=True).returncode)\n"
        "try: os.wait()\n"
        "except ChildProcessError: sys.exit(7)"
    )
    command = (sys.executable, "-c", code, "--epochs", "a b")
    process, _ = job.start_ranks(2, *command, stdin=subprocess.PIPE)
    output, _ = process.communicate("given", timeout=DEADLINE_S)
    assert output.splitlines()[0] == f"given {process.pid} ['--epochs', 'a b']"
    assert output.splitlines()[1:] == ["1 gloo", str(-signal.SIGPIPE)]
    assert process.returncode == 7


def test_signals_end_the_command_and_then_the_server(job):
    processes = job.start_ranks(2, "sh", "-c", "echo up; exec sleep 71.5")
    for process in processes:
        assert process.stdout.readline() == "up\n"
    deadline = time.monotonic() + DEADLINE_S
    while True:  # the shell has said that it is up, and becomes the sleep in a moment
        lines = [" ".join(process.cmdline()) for process in job.find_processes()]
        if lines.count("sleep 71.5") == 2 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert lines.count("sleep 71.5") == 2
    assert len(lines) == 3  # and the server
    assert not [line for line in lines if "open-sesame" in line]
    for process in processes:
        process.terminate()
        assert process.wait(DEADLINE_S) == -signal.SIGTERM
    job.await_end()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named_by_the_others(job, victim):
    processes = job.start_ranks(2, sys.executable, WORKER, victim)
    results = [finish(process) for process in processes]
    assert results[victim][0] == -signal.SIGKILL, results
    code, output = results[1 - victim]
    assert code not in (0, None)
    assert f"Horovod has been shut down: rank {victim} does not answer" in output
    job.await_end()


def test_a_rank_that_dies_with_the_server_is_told_of(job, tmp_path):
    begin = tmp_path / "begin"
    processes = job.start_ranks(2, sys.executable, WORKER, 0, begin)
    for process in processes:
        while not (line := process.stdout.readline()).startswith("worker"):
            assert line, process.wait(DEADLINE_S)
    ranks = {process.pid for process in processes}
    (server,) = (one for one in job.find_processes() if one.pid not in ranks)
    server.kill()
    begin.touch()
    code, output = finish(processes[1])
    assert code not in (0, None)
    assert "a rank is lost, and the rendezvous server" in output
    assert "beside rank 0 under hvdkit exec" in output


def test_missing_ranks_are_named_and_nobody_waits_for_ever(job):
    server = f"127.0.0.1:{find_port()}"
    for rank in (0, 2):
        options = ("--rank", rank, "-np", 4, "--rendezvous", server, "--timeout", 2)
        job.start(*EXEC, *options, "--", "echo", "started")
    for process in job.processes:
        code, output = finish(process)
        assert code == 1
        assert "ranks 1, 3 of 4 did not come within 2 s; there: 0 (" in output
        assert output.count("\n") == 1


def test_a_server_that_is_not_there_is_named(job):
    port = find_port()
    options = ("--rank", 1, "-np", 2, "--timeout", 1, "--rendezvous")
    said = {
        "no-such-host.invalid": r"no-such-host.invalid, port .*: its name does not resolve here",
        f"127.0.0.1:{port}": f"127.0.0.1, port {port}: nothing listens there",
    }
    for server in said:
        job.start(*EXEC, *options, server, "--", "true")
    for process, message in zip(job.processes, said.values(), strict=True):
        code, output = finish(process)
        assert code == 1
        assert re.search(message, output), output


def test_ranks_that_do_not_fit_each_other_are_told(job):
    server = f"127.0.0.1:{find_port()}"
    for rank, size in ((0, 2), (1, 3)):
        job.start(*EXEC, "--rank", rank, "-np", size, "--rendezvous", server, "--", "true")
    for process in job.processes:
        code, output = finish(process)
        assert code == 1
        assert "says that the job has 3 workers, rank 0 that it has 2" in output


def test_a_job_that_is_started_again_waits_for_the_port(job):
    """The server of the one before is there for some seconds, and takes nobody of the next."""
    server = f"127.0.0.1:{find_port()}"
    for _ in range(2):
        processes = [
            job.start(*EXEC, "--rank", r, "-np", 2, "--rendezvous", server, "--", "true")
            for r in (1, 0)
        ]
        assert [finish(process) for process in processes] == [(0, "")] * 2


def test_a_launch_within_a_launch_and_a_bad_command_are_refused(job):
    inner = job.start(*EXEC, "--", "true", HOROVOD_RANK="0")
    code, output = finish(inner)
    assert code == 2
    assert "horovodrun or hvdkit exec started this process already" in output
    code, output = finish(job.start(*EXEC, "--", "no-such-program"))
    assert code == 2
    assert "'no-such-program' is no program" in output
