"""One trace of all ranks, for Perfetto and Chrome: written while the timeline is read.

Process 1 is Horovod as rank 0 saw it, a thread for each tensor; process ``10 + rank`` is a rank,
with its steps and spans. Times are microseconds since the timeline began.

Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hvdkit.errors import HvdkitError
from hvdkit.profile.ranks import RankTrace

__all__ = ["MergedTrace"]

_HOROVOD = 1
_FIRST_RANK = 10
_CYCLES = 0  # the thread of the cycles; those of tensors have their numbers in the timeline


class MergedTrace:
    """Writes the trace whole or not at all; a context manager.

    Args:
        path: The file; compressed by gzip if its name ends in ``.gz``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._open: dict[Any, int] = {}  # events of each thread that have not ended
        self._separator = "[\n"

    def __enter__(self) -> MergedTrace:
        try:
            if self._path.name.endswith(".gz"):
                self._file: TextIO = gzip.open(self._part, "wt", 5, encoding="utf-8")
            else:
                self._file = self._part.open("w", encoding="utf-8")
        except OSError as error:
            raise HvdkitError(f"cannot write {self._path}: {error.strerror}") from None
        self._name("process_name", _HOROVOD, _CYCLES, "Horovod, as rank 0 saw it")
        self._name("thread_name", _HOROVOD, _CYCLES, "cycles")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.write("\n]\n")
            self._file.close()
            if kind is None:
                self._part.replace(self._path)
        except OSError as failure:
            raise HvdkitError(f"cannot write {self._path}: {failure.strerror}") from None
        finally:
            self._part.unlink(missing_ok=True)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of the timeline that made sense."""
        phase, thread = record["ph"], record.get("pid")
        if phase == "M":
            name = record.get("args", {}).get("name")
            if record.get("name") == "process_name" and isinstance(name, str):
                self._name("thread_name", _HOROVOD, thread, name)
            return
        event: dict[str, Any] = {"ph": phase, "ts": record["ts"], "pid": _HOROVOD, "tid": thread}
        if phase == "B":
            self._open[thread] = self._open.get(thread, 0) + 1
        elif phase == "E":
            left = self._open.get(thread, 0) - 1
            if left < 0:
                return
            if left:
                self._open[thread] = left
            else:
                del self._open[thread]
        elif phase == "X":
            event["ph"], event["s"] = "i", "t"
        else:
            event["tid"], event["s"] = _CYCLES, "t"
        if phase != "E":
            event["name"] = f"rank {record['name']} is ready" if phase == "X" else record["name"]
        if "args" in record:
            event["args"] = record["args"]
        self._write(event)

    def add_ranks(self, traces: Iterable[RankTrace], epoch_us: float) -> None:
        """Add the steps and spans of ranks."""
        for trace in traces:
            process = _FIRST_RANK + trace.rank
            host = trace.header.get("host", "")
            self._name("process_name", process, 0, f"rank {trace.rank} on {host}")
            self._name("thread_name", process, 0, "steps")
            self._name("thread_name", process, 1, "in the step")
            for step in trace.steps(epoch_us):
                spans = [(0, f"step {step['step']}", step["begin"], step["end"] - step["begin"])]
                spans += [(1, name, begin, length) for name, begin, length in step["spans"]]
                for thread, name, begin, length in spans:
                    event = {"ph": "X", "name": name, "ts": begin, "dur": length, "pid": process}
                    self._write({**event, "tid": thread})

    def _name(self, kind: str, process: int, thread: Any, name: str) -> None:
        event = {"ph": "M", "name": kind, "ts": 0, "pid": process, "tid": thread}
        self._write({**event, "args": {"name": name}})

    def _write(self, event: Mapping[str, Any]) -> None:
        try:
            self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
        except OSError as error:
            raise HvdkitError(f"cannot write {self._path}: {error.strerror}") from None
        self._separator = ",\n"
