"""What each rank does with its time, a line a step: what ``hvdkit profile`` reads.

Off, at the price of one comparison a call, unless ``HVDKIT_PROFILE_DIR`` names a folder when an
adapter starts it: ``hvdkit.torch`` in ``init``, ``hvdkit.keras`` in its broadcast callback. Then
each rank writes ``rank-N.jsonl`` there: first a header, then for each step its begin and end and
its spans, as ``[name, begin, duration]``. Times are microseconds of the rank's own monotonic clock;
the header says how far that is from rank 0's. Elastic jobs are not traced.

Spans that adapters write: ``backward`` (from its first gradient), ``wait`` (for reductions, with
nothing else to do) and ``update``.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdkit.agreement import Gather, share_errors
from hvdkit.env import is_elastic
from hvdkit.errors import HvdkitError

__all__ = [
    "FORMAT",
    "TRACED",
    "VARIABLE",
    "Recorder",
    "begin",
    "end",
    "end_step",
    "is_on",
    "measure_offset",
    "span",
    "start",
]

VARIABLE = "HVDKIT_PROFILE_DIR"
FORMAT = 1
# Operations whose waits are traced have this in their names.
TRACED = "hvdkit.optimizer"

_ROUNDS = 16
# A script whose steps are never ended must not fill the memory.
_MOST_SPANS = 4096


def _now_us() -> int:
    return time.monotonic_ns() // 1000


class Recorder:
    """Writes the trace of one rank; every line at once, so that a killed worker leaves them.

    Args:
        path: The file, which is overwritten: Horovod starts its timeline anew as well.
        header: What the first line holds.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._spans: deque[tuple[str, int, int]] = deque(maxlen=_MOST_SPANS)
        self._open: dict[str, int] = {}
        self._begin_us: int | None = None
        self._step = 0
        self._write(header)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def begin(self, name: str) -> None:
        """Begin a span; one that is open already goes on."""
        now_us = self._open.setdefault(name, _now_us())
        if self._begin_us is None:
            self._begin_us = now_us

    def end(self, name: str) -> None:
        """End a span; one that is not open is left out."""
        begin_us = self._open.pop(name, None)
        if begin_us is not None:
            self._spans.append((name, begin_us, _now_us() - begin_us))

    def end_step(self) -> None:
        """Write the step that ends now; the next one begins."""
        now_us = _now_us()
        if self._begin_us is not None:
            line = {"step": self._step, "begin": self._begin_us, "end": now_us}
            self._write({**line, "spans": list(self._spans)})
            self._step += 1
        self._spans.clear()
        self._open.clear()  # of a pass that broke off
        self._begin_us = now_us

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_recorder: Recorder | None = None


def start(
    rank: int, size: int, framework: str, gather: Gather, environ: Mapping[str, str] = os.environ
) -> None:
    """Begin to trace if the environment asks for it; what was begun before is closed.

    Collective, where ``HVDKIT_PROFILE_DIR`` is set: every rank must call.

    Args:
        rank: This process's number among all workers.
        size: Number of all workers.
        framework: Its name, for people.
        gather: Collects an object of every rank, in the order of the ranks.
        environ: The variables; default those of this process.

    Raises:
        HvdkitError: On every rank, if one of them cannot write its file.
    """
    global _recorder
    if _recorder is not None:
        _recorder.close()
        _recorder = None
    folder = environ.get(VARIABLE)
    if not folder or is_elastic(environ):
        return  # in an elastic job a rank that joins initializes alone
    offset_us, error_us = measure_offset(rank, gather)
    header = {
        "hvdkit_trace": FORMAT,
        "rank": rank,
        "size": size,
        "framework": framework,
        "host": socket.gethostname(),
        "clock_offset_us": offset_us,
        "clock_error_us": error_us,
        "epoch_minus_clock_us": time.time_ns() // 1000 - _now_us(),
        "started_us": _now_us(),
    }
    with share_errors("hvdkit.trace.open", gather=gather, ranks=range(size)):
        try:
            _recorder = Recorder(Path(folder, f"rank-{rank}.jsonl"), header)
        except OSError as error:
            raise HvdkitError(
                f"cannot write a trace into {folder} ({VARIABLE}): {error.strerror}; every host "
                "needs this folder"
            ) from None


def measure_offset(rank: int, gather: Gather, rounds: int = _ROUNDS) -> tuple[float, float]:
    """Return how far this rank's clock is ahead of rank 0's, and by how much that may be wrong.

    No rank leaves a collective before every rank has entered it. So each round bounds the offset
    from both sides, and the truth lies in the intersection. It is measured once: clocks of
    different hosts that are not kept in step drift apart during a long run.

    Source: K. Marzullo, S. Owicki, "Maintaining the time in a distributed system", PODC 1983.

    Collective: every rank must call.

    Returns:
        Offset and error in microseconds; 0 and 0 on the host of rank 0, where both are one clock.
    """
    boot = _read_boot()
    entered, left = [], []
    for _ in range(rounds):
        entered.append(_now_us())
        gather(None, "hvdkit.trace.clock")
        left.append(_now_us())
    root_boot, root_entered, root_left = gather((boot, entered, left), "hvdkit.trace.clocks")[0]
    low = max(mine - root for mine, root in zip(entered, root_left, strict=True))
    high = min(mine - root for mine, root in zip(left, root_entered, strict=True))
    if rank == 0 or (boot and boot == root_boot and low <= 0 <= high):
        return 0.0, 0.0
    return (low + high) / 2, abs(high - low) / 2


def _read_boot() -> str:
    """Return what tells one start of a machine's kernel from another; empty if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_on() -> bool:
    """Whether this rank traces."""
    return _recorder is not None


def begin(name: str) -> None:
    """Begin a span, if tracing is on."""
    if _recorder is not None:
        _recorder.begin(name)


def end(name: str) -> None:
    """End a span, if tracing is on."""
    if _recorder is not None:
        _recorder.end(name)


def end_step() -> None:
    """End the step, if tracing is on."""
    if _recorder is not None:
        _recorder.end_step()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Trace what is done inside, if tracing is on."""
    begin(name)
    try:
        yield
    finally:
        end(name)
