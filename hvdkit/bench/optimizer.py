"""The step time of a distributed optimizer against its peers, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from typing import Any

from hvdkit.bench.catalog import CANDIDATES, ENVIRONMENT, FRAMEWORKS, MODELS
from hvdkit.bench.settings import require_known, require_positive
from hvdkit.bench.team import Team
from hvdkit.bench.timing import rotate, summarize_round
from hvdkit.errors import HvdkitError
from hvdkit.results.files import make_result, make_series
from hvdkit.results.fingerprint import read_fingerprint
from hvdkit.results.statistics import estimate_geometric_mean, estimate_ratio

__all__ = ["Settings", "compare_candidates", "measure"]

READY_S = 300


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        framework: a name from ``FRAMEWORKS``.
        models: names from ``MODELS``.
        candidates: names from the framework's ``CANDIDATES``; by default all of them.
        rounds: how often each candidate gets its turn.
        steps: timed steps a turn.
        warmup_steps: steps of each candidate before the first round.
        workers: processes a candidate.
        threads: compute threads a process.
    """

    framework: str = "torch"
    models: tuple[str, ...] = MODELS
    candidates: tuple[str, ...] | None = None
    rounds: int = 15
    steps: int = 15
    warmup_steps: int = 10
    workers: int = 2
    threads: int = 1

    def __post_init__(self) -> None:
        """Refuse names that do not exist and counts below one."""
        if self.framework not in FRAMEWORKS:
            raise HvdkitError(
                f"framework must be one of {', '.join(FRAMEWORKS)}; got {self.framework}"
            )
        if self.candidates is None:
            object.__setattr__(self, "candidates", CANDIDATES[self.framework])
        require_known("models", self.models, MODELS)
        require_known("candidates", self.candidates or (), CANDIDATES[self.framework])
        require_positive(self, "rounds", "steps", "warmup_steps", "workers", "threads")


def measure(settings: Settings, report: Callable[[str, int], None]) -> dict[str, Any]:
    """Time every candidate on every model; return the result, ready for ``write_result``.

    Args:
        settings: what to measure.
        report: called with what goes on now and the number of turns done since the last call.

    Raises:
        HvdkitError: workers could not be launched, or broke off.
    """
    machine = read_fingerprint()
    models = {name: _measure_model(name, settings, report) for name in settings.models}
    comparisons = compare_candidates(models)
    series = [
        make_series(
            "step_s",
            "s",
            measured.pop("step_s"),
            lower_is_better=True,
            framework=settings.framework,
            model=name,
            candidate=candidate,
            workers=settings.workers,
            threads=settings.threads,
            batch=model["batch"],
            parameters=model["parameters"],
            dtype="float32",
            controller="gloo",
        )
        for name, model in models.items()
        for candidate, measured in model["candidates"].items()
    ]
    summary = {"models": models, "comparisons": comparisons}
    return make_result("optimizer", asdict(settings), series, summary, machine)


def _measure_model(
    name: str, settings: Settings, report: Callable[[str, int], None]
) -> dict[str, Any]:
    with ExitStack() as stack:
        teams: dict[str, Team] = {}
        for candidate in settings.candidates or ():
            report(f"{name}: start {candidate}", 0)
            worker = ["hvdkit.bench.training_worker", "--framework", settings.framework]
            worker += ["--candidate", candidate, "--model", name]
            team = Team(
                f"{candidate!r} on {name!r}",
                worker,
                size=settings.workers,
                threads=settings.threads,
                environment=ENVIRONMENT.get(candidate, {}),
            )
            teams[candidate] = stack.enter_context(team)
            # One launch at a time: together they could exceed a small machine's memory and cores.
            team.wait_until_ready(READY_S)
            team.ask(settings.warmup_steps)
        step_s: dict[str, list[list[list[float]]]] = {candidate: [] for candidate in teams}
        for turn in range(settings.rounds):
            for candidate in rotate(list(teams), turn):
                step_s[candidate].append(teams[candidate].ask(settings.steps))
                report(f"{name}: {candidate}", 1)
        hello = next(iter(teams.values())).hello[0]
        peak_rss_bytes = {candidate: team.finish() for candidate, team in teams.items()}
    return {
        **{key: hello[key] for key in ("parameters", "tensors", "batch", "threads")},
        "candidates": {
            candidate: {
                "median_step_s": median(summarize_round(ranks_s) for ranks_s in rounds),
                "peak_rss_bytes": peak_rss_bytes[candidate],
                "step_s": rounds,
            }
            for candidate, rounds in step_s.items()
        },
    }


def compare_candidates(models: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare every candidate with those named after it, a model at a time and over all models.

    Args:
        models: ``candidates`` of each hold ``step_s`` as [round][rank][step].

    Returns:
        One record a pair: ``candidate``, ``reference``, ``models`` (name to interval) and
        ``geometric_mean`` (interval); a ratio below 1 means that the candidate is faster.
    """
    rounds_s = {
        model: {
            candidate: [summarize_round(ranks_s) for ranks_s in measured["step_s"]]
            for candidate, measured in result["candidates"].items()
        }
        for model, result in models.items()
    }
    comparisons = []
    for candidate, reference in combinations(next(iter(rounds_s.values())), 2):
        ratios = {
            model: [a / b for a, b in zip(times[candidate], times[reference], strict=True)]
            for model, times in rounds_s.items()
        }
        comparisons.append(
            {
                "candidate": candidate,
                "reference": reference,
                "models": {name: asdict(estimate_ratio(each)) for name, each in ratios.items()},
                "geometric_mean": asdict(estimate_geometric_mean(ratios)),
            }
        )
    return comparisons
