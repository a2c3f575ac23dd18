"""Latency and bandwidth of all-reduces over message sizes, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from hvdkit.bench.allreduce_summary import summarize
from hvdkit.bench.catalog import ENVIRONMENT
from hvdkit.bench.crew import Crew
from hvdkit.bench.settings import require_known, require_positive
from hvdkit.bench.team import Team
from hvdkit.bench.timing import rotate
from hvdkit.errors import HvdkitError
from hvdkit.results.files import make_result, make_series
from hvdkit.results.fingerprint import read_fingerprint

__all__ = ["CANDIDATES", "DTYPES", "Settings", "measure"]

CANDIDATES = ("hvdkit", "horovod", "mpi", "torch", "copy")
DEFAULT_CANDIDATES = ("hvdkit", "horovod", "torch", "copy")
DTYPES = {"float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
READY_S = 300

# A turn takes about as long for every size, within these bounds.
TURN_BYTES = 64 << 20
OPERATIONS = (5, 50)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        sizes_bytes: of a message.
        dtypes: names from ``DTYPES``.
        candidates: names from ``CANDIDATES``: hvdkit and stock Horovod on Gloo, Horovod on MPI,
            torch.distributed on Gloo, and a copy in memory.
        cycle_times_ms: of Horovod's cycle; each makes a candidate of hvdkit's more.
        tensors: how many tensors a message is made of, which are reduced as one group.
        rounds: how often each candidate gets its turn with each message.
        workers: processes a candidate.
        threads: compute threads a process.
    """

    sizes_bytes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float32",)
    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    cycle_times_ms: tuple[float, ...] = ()
    tensors: int = 1
    rounds: int = 5
    workers: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        """Refuse names that do not exist, counts below one and messages without an element."""
        require_known("dtypes", self.dtypes, DTYPES)
        require_known("candidates", self.candidates, CANDIDATES)
        require_positive(self, "tensors", "rounds", "threads")
        if any(not 0 < one < 1000 for one in self.cycle_times_ms):
            raise HvdkitError("cycle times must be above 0 and below 1000 ms")
        if self.workers < 2:
            raise HvdkitError(f"an all-reduce needs at least 2 workers; got {self.workers}")
        if not self.sizes_bytes or len(set(self.sizes_bytes)) < len(self.sizes_bytes):
            raise HvdkitError("sizes must be distinct, and at least one")
        smallest = self.tensors * max(DTYPES[name] for name in self.dtypes)
        if min(self.sizes_bytes) < smallest:
            raise HvdkitError(
                f"a message of {min(self.sizes_bytes)} bytes is too small: {self.tensors} "
                f"tensor(s) of one element need {smallest}"
            )

    def count_turns(self) -> int:
        """Return how many turns the measurement takes."""
        teams = len(self.candidates) + len(self.cycle_times_ms)
        return teams * len(self.sizes_bytes) * len(self.dtypes) * self.rounds


def measure(settings: Settings, crew: Crew, report: Callable[[str, int], None]) -> dict[str, Any]:
    """Time every message of every candidate; return the result, ready for ``write_result``.

    Args:
        settings: what to measure.
        crew: At least as many slots as there are workers.
        report: called with what goes on now and the number of turns done since the last call.

    Raises:
        HvdkitError: workers could not be launched or broke off, or a sum was wrong.
    """
    machine = read_fingerprint()
    messages = [(dtype, size) for dtype in settings.dtypes for size in settings.sizes_bytes]
    samples: dict[tuple[str, str, int], list[list[list[float]]]] = {}
    with ExitStack() as stack:
        teams = _start_teams(settings, crew, stack, report)
        for turn in range(settings.rounds):
            for dtype, size in messages:
                for name in rotate(list(teams), turn):
                    answers = teams[name].ask(_make_request(dtype, size, settings.tensors))
                    _require_right(answers, name, dtype, size)
                    durations_s = [answer["durations_s"] for answer in answers]
                    samples.setdefault((name, dtype, size), []).append(durations_s)
                    report(f"{name}, {size} bytes of {dtype}", 1)
        for team in teams.values():
            team.finish()
    series = [
        make_series(
            "allreduce_s",
            "s",
            rounds,
            lower_is_better=True,
            candidate=candidate,
            dtype=dtype,
            size_bytes=size,
            tensors=settings.tensors,
            workers=settings.workers,
            threads=settings.threads,
            controller="mpi" if candidate == "mpi" else "gloo",
        )
        for (candidate, dtype, size), rounds in samples.items()
    ]
    summary = summarize(samples, settings.workers)
    return make_result("allreduce", asdict(settings), series, summary, machine)


def _start_teams(
    settings: Settings, crew: Crew, stack: ExitStack, report: Callable[[str, int], None]
) -> dict[str, Team]:
    """Start a team for each candidate, and for each cycle time."""
    environments = {name: dict(ENVIRONMENT.get(name, {})) for name in settings.candidates}
    for cycle_time_ms in settings.cycle_times_ms:
        name = f"hvdkit, cycle {cycle_time_ms:g} ms"
        environments[name] = {"HOROVOD_CYCLE_TIME": f"{cycle_time_ms:g}"}
    teams = {}
    for name, environment in environments.items():
        report(f"start {name}", 0)
        slots = crew
        if name == "mpi":
            slots = stack.enter_context(Crew(settings.workers, controller="mpi"))
            slots.launch()
        teams[name] = slots.start(
            name,
            "hvdkit.bench.allreduce_worker",
            {"candidate": name.partition(",")[0], "threads": settings.threads},
            size=settings.workers,
            threads=settings.threads,
            environment=environment,
        )
        teams[name].wait_until_ready(READY_S)
    return teams


def _make_request(dtype: str, size_bytes: int, tensors: int) -> dict[str, Any]:
    fewest, most = OPERATIONS
    operations = max(fewest, min(most, TURN_BYTES // size_bytes))
    return {"dtype": dtype, "size_bytes": size_bytes, "tensors": tensors, "operations": operations}


def _require_right(
    answers: Sequence[Mapping[str, Any]], candidate: str, dtype: str, size: int
) -> None:
    wrong = {rank: answer["wrong"] for rank, answer in enumerate(answers) if answer["wrong"]}
    if wrong:
        where = ", ".join(f"{count} on rank {rank}" for rank, count in wrong.items())
        raise HvdkitError(
            f"{candidate} computed wrong sums of {size} bytes of {dtype}: {where}. Do not train "
            "on this: run `hvdkit check`, and try HOROVOD_SOCKETS_ONLY=1"
        )
