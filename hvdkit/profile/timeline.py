"""What a Horovod timeline says: operations of each tensor by phase, steps, and who came last.

Rank 0 writes the timeline. Each tensor is a "process" in it. An operation of a tensor is

- its *negotiation*: from when the first rank is known to have the tensor until all have. While a
  response is not cached, an instant for each rank says when rank 0 heard of it; a cached one begins
  with the end of a cycle, which may be as late as ranks sleep when idle;
- its *queue*: until Horovod's thread comes to it, and waits for data of a GPU;
- its *copy*: into and out of the fusion buffer, allocations, and other preparation;
- its *transfer*: ``GLOO_ALLREDUCE`` and its like. Fused tensors have the same transfer, which
  counts in full for each of them; the times of a step count it once.

Source: horovod 0.28.1, common/timeline.cc, common/controller.cc, common/operations.cc.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvdkit.profile.sketch import Durations, Reservoir
from hvdkit.profile.stragglers import Lateness

__all__ = ["PHASES", "Tensor", "Timeline", "measure_bytes"]

PHASES = ("negotiation", "queue", "copy", "transfer")
_NEGOTIATION, _QUEUE, _COPY, _TRANSFER = range(4)
_NEGOTIATE = "NEGOTIATE_"
_WAITS = {"QUEUE", "WAIT_FOR_DATA", "WAIT_FOR_OTHER_TENSOR_DATA"}
_TRANSFERS = ("GLOO_", "MPI_", "NCCL_", "CCL_")
_OPERATIONS = {"ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER", "ADASUM"}
_OPERATIONS |= {"BARRIER", "ERROR"}
_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip

# Names beyond these are counted together: unnamed operations get a new name each time.
MOST_TENSORS = 4096
MOST_PIDS = 1 << 16
OTHERS = "(further names)"
# Operations that tracing itself makes.
OWN = ".hvdkit.trace."
_UNNAMED = re.compile(r"\.noname\.\d+")

# Without marks of the cycles: hvdkit's Horovod may sleep this long, so that rank 0 hears of other
# ranks no earlier.
_LONGEST_CYCLE_US = 5000.0
_MOST_US = 1e14


class Tensor:
    """What is kept of all operations of one tensor."""

    __slots__ = ("kind", "name", "phases", "size_bytes", "total")

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = ""
        self.size_bytes: int | None = None
        self.phases = tuple(Durations() for _ in PHASES)
        self.total = Durations()


class _Process:
    """Where one tensor's operation stands."""

    __slots__ = ("begin", "negotiated", "own", "pid", "spent", "stack", "tensor", "ticks", "traced")

    def __init__(
        self, tensor: Tensor, *, traced: bool = False, own: bool = False, pid: Any = None
    ) -> None:
        self.tensor = tensor
        self.traced = traced
        self.own = own
        self.pid = pid  # of one that is forgotten when it is done
        self.stack: list[tuple[int, float]] = []  # phase or -1 for the operation, and its begin
        self.begin: float | None = None
        self.negotiated: float | None = None
        self.spent = [0.0, 0.0, 0.0, 0.0]
        self.ticks: list[tuple[float, int, int]] = []  # time, rank, cycle


class _Busy:
    """The time in which at least one of several things goes on."""

    __slots__ = ("count", "since", "taken")

    def __init__(self) -> None:
        self.count, self.since, self.taken = 0, 0.0, 0.0

    def enter(self, ts: float) -> None:
        if self.count == 0:
            self.since = ts
        self.count += 1

    def leave(self, ts: float) -> bool:
        """Return whether nothing goes on any more."""
        self.count -= 1
        if self.count == 0:
            self.taken += ts - self.since
        return self.count == 0

    def take(self, ts: float) -> float:
        """Return the time since the last call."""
        if self.count:
            self.taken += ts - self.since
            self.since = ts
        taken, self.taken = self.taken, 0.0
        return taken


class Timeline:
    """Takes the records of a timeline one by one.

    A step lasts from one end of rank 0's steps to the next where there is a trace of them. Else a
    step begins with the first all-reduce of a tensor that this step has had already: each tensor's
    n-th operation belongs to step n, and a tensor that is reduced once in many steps moves none.
    Left out of what steps come to are the first, which has the setup in it, and the last, of which
    Horovod drops what it has not written when the script ends.

    Args:
        boundaries: The begin of rank 0's first step and the end of each, in microseconds of the
            timeline; None without a trace.
        traced: Part of the names of the operations whose waits the ranks traced.
        on_transfer: Called with begin and end of each time in which such operations were carried
            out, in the steps that count.
    """

    def __init__(
        self,
        boundaries: Iterator[float] | None = None,
        traced: str = "",
        on_transfer: Callable[[float, float], None] | None = None,
    ) -> None:
        self.epoch_us: float | None = None
        self.recognized = False
        self.begin_us: float | None = None
        self.end_us = 0.0
        self.odd = 0  # events that make no sense where they stand
        self.unnamed = False
        self.operations = 0
        self.cycles = 0
        # Of the whole run, and of the steps that count; with the numbers of negotiations.
        self.lateness = Lateness(), Lateness()
        self.negotiations = [0, 0]
        self.steps = Reservoir()
        self.steps_us = 0.0
        self.step_sums = [0.0] * (len(PHASES) + 1)
        self.tensors: dict[str, Tensor] = {}
        self._processes: dict[Any, _Process] = {}
        self._passing: dict[Any, _Process] = {}  # of names beyond the most, until they are done
        self._boundaries = boundaries
        self._next = math.inf if boundaries is None else next(boundaries, math.inf)
        self._traced, self._on_transfer = traced, on_transfer
        self._step = -1  # the step under way; before the first one -1
        self._step_begin = 0.0
        self._seen: set[str] = set()
        self._busy = tuple(_Busy() for _ in PHASES)
        self._carrying = _Busy()  # any operation
        self._exchanging = _Busy()  # operations whose waits are traced
        self._exchanges: list[tuple[float, float]] = []  # their times in this step

    # -- records ---------------------------------------------------------------------------

    def feed(self, record: Mapping[str, Any]) -> bool:
        """Take one record; return whether it made sense."""
        phase = record.get("ph")
        if phase == "M":
            return self._name(record)
        ts = record.get("ts")
        if type(ts) is not int and (type(ts) is not float or not math.isfinite(ts)):
            return self._refuse()
        if not 0 <= ts < _MOST_US:
            return self._refuse()
        if ts < self.end_us:
            ts = self.end_us  # another thread was faster
        elif self.begin_us is None:
            self.begin_us = ts
        self.end_us = ts
        while ts >= self._next:
            self._end_step(self._next)
            self._advance()
        if phase == "i":
            if record.get("name") == "CYCLE_START":
                self.cycles += 1
            return True
        process = self._find(record.get("pid"))
        if process is None:
            return self._refuse()
        if process.own:
            return False
        if phase == "B":
            return self._begin(process, record.get("name"), ts)
        if phase == "E":
            return self._end(process, ts, record.get("args"))
        if phase == "X":
            return self._tick(process, record.get("name"), ts)
        return self._refuse()

    @property
    def unfinished(self) -> int:
        """Operations that had not ended when the file did."""
        kept = sum(process.begin is not None for process in self._processes.values())
        return kept + len(self._passing)

    def _refuse(self) -> bool:
        self.odd += 1
        return False

    def _name(self, record: Mapping[str, Any]) -> bool:
        arguments = record.get("args")
        if record.get("name") != "process_name" or not isinstance(arguments, dict):
            return True
        epoch_us = arguments.get("start_time_since_epoch_in_micros")
        if type(epoch_us) is int:
            self.recognized = True
            self.epoch_us = epoch_us
        name, pid = arguments.get("name"), record.get("pid")
        if isinstance(name, str) and isinstance(pid, int) and len(self._processes) < MOST_PIDS:
            self._processes[pid] = self._open_process(name)
        return True

    def _open_process(self, name: str) -> _Process:
        if OWN in name:
            return _Process(Tensor(name), own=True)
        plain = _UNNAMED.sub(".noname.*", name)
        self.unnamed = self.unnamed or plain != name
        if plain not in self.tensors and len(self.tensors) >= MOST_TENSORS:
            plain = OTHERS
        tensor = self.tensors.setdefault(plain, Tensor(plain))
        return _Process(tensor, traced=bool(self._traced) and self._traced in name)

    def _find(self, pid: Any) -> _Process | None:
        if pid.__class__ is not int:
            return None
        process = self._processes.get(pid) or self._passing.get(pid)
        if process is None and len(self._processes) >= MOST_PIDS > len(self._passing):
            others = self.tensors.setdefault(OTHERS, Tensor(OTHERS))
            process = self._passing[pid] = _Process(others, pid=pid)
        return process

    # -- operations ------------------------------------------------------------------------

    def _begin(self, process: _Process, name: Any, ts: float) -> bool:
        if not isinstance(name, str):
            return self._refuse()
        stack = process.stack
        if name.startswith(_NEGOTIATE):
            if stack or process.negotiated is not None:
                self._drop(process, ts)  # its end was lost
            self._end_if_seen(process.tensor.name, name[len(_NEGOTIATE) :], ts)
            process.begin = ts
            self._busy[_NEGOTIATION].enter(ts)
            stack.append((_NEGOTIATION, ts))
        elif not stack:
            if name not in _OPERATIONS:
                return self._refuse()
            if process.negotiated is not None:
                self._busy[_QUEUE].leave(ts)
                process.spent[_QUEUE] += ts - process.negotiated
                process.negotiated = None
            elif process.begin is None:  # rank 0 does not negotiate for this process set
                self._end_if_seen(process.tensor.name, name, ts)
                process.begin = ts
            self.recognized = True
            process.tensor.kind = name
            self._carrying.enter(ts)
            if process.traced:
                self._exchanging.enter(ts)
            stack.append((-1, ts))
        else:
            if name.startswith(_TRANSFERS):
                phase = _TRANSFER
            else:
                phase = _QUEUE if name in _WAITS else _COPY
            self._busy[phase].enter(ts)
            stack.append((phase, ts))
        return True

    def _end(self, process: _Process, ts: float, arguments: Any) -> bool:
        if not process.stack:
            return self._refuse()
        phase, begin = process.stack.pop()
        if phase >= 0:
            self._busy[phase].leave(ts)
            process.spent[phase] += ts - begin
            if phase == _NEGOTIATION:
                self._end_negotiation(process, ts)
            return True
        self._leave_operation(process, ts)
        tensor, spent = process.tensor, process.spent
        for durations, spent_us in zip(tensor.phases, spent, strict=True):
            durations.add(spent_us)
        if process.begin is not None:
            tensor.total.add(ts - process.begin)
        if isinstance(arguments, dict) and tensor.name != OTHERS:
            tensor.size_bytes = measure_bytes(arguments) or tensor.size_bytes
        self.operations += 1
        process.begin = None
        process.spent = [0.0, 0.0, 0.0, 0.0]
        if process.pid is not None:
            del self._passing[process.pid]
        return True

    def _end_negotiation(self, process: _Process, ts: float) -> None:
        process.negotiated = ts
        self._busy[_QUEUE].enter(ts)
        spheres = (0, 1) if self._step > 0 else (0,)
        for sphere in spheres:
            self.negotiations[sphere] += 1
        ticks = process.ticks
        if len(ticks) > 1:
            # Rank 0 is told of all that came within one cycle at the same time, in the order of
            # the ranks: that order says nothing.
            *_, (_, _, before), (_, _, last) = ticks
            if self.cycles:
                tolerance_us = math.inf if before == last else 0.0
            else:
                tolerance_us = _LONGEST_CYCLE_US
            for sphere in spheres:
                self.lateness[sphere].add([(at, rank) for at, rank, _ in ticks], tolerance_us)
        process.ticks = []

    def _leave_operation(self, process: _Process, ts: float) -> None:
        self._carrying.leave(ts)
        if process.traced:
            since = self._exchanging.since
            if self._exchanging.leave(ts) and self._step > 0:
                self._exchanges.append((since, ts))

    def _drop(self, process: _Process, ts: float) -> None:
        """Forget an operation of which records are missing."""
        self.odd += 1
        for phase, _ in process.stack:
            if phase >= 0:
                self._busy[phase].leave(ts)
            else:
                self._leave_operation(process, ts)
        if process.negotiated is not None:
            self._busy[_QUEUE].leave(ts)
        process.stack.clear()
        process.ticks, process.negotiated = [], None
        process.spent = [0.0, 0.0, 0.0, 0.0]

    def _tick(self, process: _Process, name: Any, ts: float) -> bool:
        if not isinstance(name, str) or not name.isdecimal() or not process.stack:
            return self._refuse()
        process.ticks.append((ts, int(name), self.cycles))
        return True

    # -- steps -----------------------------------------------------------------------------

    def _advance(self) -> None:
        assert self._boundaries is not None
        self._next = next(self._boundaries, math.inf)
        if self._next == math.inf:
            self._step = -1  # what follows belongs to no step

    def _end_if_seen(self, name: str, kind: str, ts: float) -> None:
        if self._boundaries is not None or kind not in ("ALLREDUCE", "ADASUM"):
            return
        if name == OTHERS or name.endswith(".noname.*"):
            return  # nobody knows which of them comes again
        if name in self._seen or self._step < 0:
            self._end_step(ts)
        self._seen.add(name)

    def _end_step(self, ts: float) -> None:
        row = [busy.take(ts) for busy in (*self._busy, self._carrying)]
        if self._step > 0:
            period_us = ts - self._step_begin
            self.steps.add((period_us, *row))
            self.steps_us += period_us
            for index, value in enumerate(row):
                self.step_sums[index] += value
            if self._on_transfer is not None:
                for begin, end in self._exchanges:
                    self._on_transfer(begin, end)
        self._exchanges.clear()
        self._step += 1
        self._step_begin = ts
        self._seen.clear()


def measure_bytes(arguments: Mapping[str, Any]) -> int | None:
    """Return the size that an operation's result has by its ``dtype`` and ``shape``, or None."""
    dtype, shape = arguments.get("dtype"), arguments.get("shape")
    if dtype not in _BYTES or not isinstance(shape, str):
        return None
    return math.prod(map(int, re.findall(r"\d{1,18}", shape))) * _BYTES[dtype]
