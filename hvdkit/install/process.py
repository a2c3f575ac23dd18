"""Ending a child process with everything that it started."""

import os
import signal
import subprocess
import time

__all__ = ["end_process_group"]


def end_process_group(process: subprocess.Popen, grace_s: float = 5.0) -> None:
    """End a child that leads its own session, and all that it started: TERM, then KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader; its group may live on
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
    process.wait()
