"""The throughput of training at several numbers of workers, against other ways, interleaved.

A step lasts as long as its slowest rank; samples/s are those of all ranks over that time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdkit.bench.catalog import CANDIDATES, ENVIRONMENT, FRAMEWORKS, Recipe
from hvdkit.bench.crew import Crew
from hvdkit.bench.models import MODELS
from hvdkit.bench.settings import require_known, require_positive, require_workers
from hvdkit.bench.team import Team
from hvdkit.bench.timing import rotate
from hvdkit.bench.train_summary import Measured, summarize
from hvdkit.errors import HvdkitError
from hvdkit.results.files import make_result, make_series
from hvdkit.results.fingerprint import read_fingerprint

__all__ = ["Settings", "measure"]

READY_S = 300
OWN = "hvdkit"


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        framework: A name from ``FRAMEWORKS``.
        models: Names from ``MODELS``.
        workers: Numbers of workers.
        against: Names from the framework's ``CANDIDATES``, beside hvdkit and "single", which
            are always measured.
        batch: Samples a worker takes in one pass, or with ``strong`` all workers together; None
            for the model's own.
        strong: Whether the batch is divided among the workers.
        repeats: How often each candidate gets its turn.
        steps: Timed steps a turn.
        warmup_steps: Of each candidate before the first turn.
        threads: Compute threads a worker.
        dtype: As in ``Recipe``, as are those that follow.
        accumulate: Passes a step.
        compression: What gradients travel in.
        bucket_size_mb: Of gradients that travel together.
        input: Folder of images.
        price_per_worker_hour: In any currency; None if unknown.
    """

    framework: str = "torch"
    models: tuple[str, ...] = ("mlp",)
    workers: tuple[int, ...] = (1, 2)
    against: tuple[str, ...] = ()
    batch: int | None = None
    strong: bool = False
    repeats: int = 10
    steps: int = 15
    warmup_steps: int = 10
    threads: int = 1
    dtype: str = "float32"
    accumulate: int = 1
    compression: str = "none"
    bucket_size_mb: float | None = None
    input: str | None = None
    price_per_worker_hour: float | None = None

    def __post_init__(self) -> None:
        """Refuse names that do not exist, counts below one, and what a candidate cannot do."""
        require_known("framework", (self.framework,), FRAMEWORKS)
        require_known("models", self.models, MODELS)
        if self.against:
            peers = [one for one in CANDIDATES[self.framework] if one != OWN]
            require_known(f"--against for {self.framework}", self.against, peers)
        require_positive(self, "repeats", "steps", "warmup_steps", "threads", "accumulate")
        require_workers(self.workers)
        if self.batch is not None and self.batch < 1:
            raise HvdkitError(f"a batch must be at least 1; got {self.batch}")
        for name in ("bucket_size_mb", "price_per_worker_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise HvdkitError(f"{name} must be a number above 0; got {value}")
        for model in self.models:
            for workers in self.workers:
                self.make_recipes(model, workers)

    def make_recipes(self, model: str, workers: int) -> list[Recipe]:
        """Return how each candidate trains a model with so many workers."""
        batch = self.batch or MODELS[model].batch
        if self.strong:
            batch, rest = divmod(batch, workers)
            if rest:
                raise HvdkitError(
                    f"a batch of {self.batch or MODELS[model].batch} cannot be divided among "
                    f"{workers} workers; choose a multiple with --batch-size"
                )
        own = Recipe(
            self.framework,
            OWN,
            model,
            batch,
            self.threads,
            self.dtype,
            self.accumulate,
            self.compression,
            self.bucket_size_mb,
            self.input,
        )
        names = [OWN, *(name for name in self.against if name != "single"), "single"]
        return [replace(own, candidate=name) for name in names]

    def count_turns(self) -> int:
        """Return how many turns the measurement takes."""
        teams = len(self.workers) * len(self.make_recipes(self.models[0], max(self.workers)))
        return len(self.models) * teams * self.repeats


def measure(settings: Settings, crew: Crew, report: Callable[[str, int], None]) -> dict[str, Any]:
    """Time every candidate on every model; return the result, ready for ``write_result``.

    Args:
        settings: What to measure.
        crew: At least as many slots as there are workers.
        report: Called with what goes on now and the number of turns done since the last call.

    Raises:
        HvdkitError: Workers broke off, or there is no memory for all of them.
    """
    machine = read_fingerprint()
    measured = [
        one for model in settings.models for one in _measure_model(model, settings, crew, report)
    ]
    series = [
        make_series(metric, "s", rounds, lower_is_better=True, **one.labels, controller="gloo")
        for one in measured
        for metric, rounds in one.samples.items()
    ]
    summary = summarize(measured, settings.price_per_worker_hour)
    summary["hosts"] = sorted(set(crew.hosts))
    return make_result("train", asdict(settings), series, summary, machine)


def _measure_model(
    model: str, settings: Settings, crew: Crew, report: Callable[[str, int], None]
) -> list[Measured]:
    teams: list[tuple[Team, Measured]] = []
    for workers in settings.workers:
        for recipe in settings.make_recipes(model, workers):
            title = f"{model}, {recipe.candidate}, {workers} worker(s)"
            report(f"{title}: start", 0)
            if teams:
                _require_memory([team for team, _ in teams], title, crew.hosts[:workers])
            team = crew.start(
                title,
                "hvdkit.bench.training_worker",
                asdict(recipe),
                size=workers,
                threads=settings.threads,
                environment=_make_environment(recipe),
            )
            # One start at a time: together they could exceed a small machine's memory and cores.
            team.wait_until_ready(READY_S)
            team.ask(settings.warmup_steps)
            overhead_s = max(hello["overhead_s"] for hello in team.hello)
            teams.append((team, Measured(_make_labels(recipe, workers, settings), overhead_s)))
    for turn in range(settings.repeats):
        for team, measured in rotate(teams, turn):
            answers = team.ask(settings.steps)
            measured.add_round(answers)
            report(f"{model}, {measured.labels['candidate']}, {team.size} worker(s)", 1)
    for team, measured in teams:
        measured.peak_rss_bytes = team.finish()
    return [measured for _, measured in teams]


def _make_environment(recipe: Recipe) -> dict[str, str]:
    environment = dict(ENVIRONMENT.get(recipe.candidate, {}))
    if recipe.candidate == "horovod" and recipe.bucket_size_mb is not None:
        environment["HOROVOD_FUSION_THRESHOLD"] = str(int(recipe.bucket_size_mb * (1 << 20)))
    return environment


def _make_labels(recipe: Recipe, workers: int, settings: Settings) -> dict[str, Any]:
    model = MODELS[recipe.model]
    return {
        "framework": recipe.framework,
        "model": recipe.model,
        "candidate": recipe.candidate,
        "workers": workers,
        "threads": recipe.threads,
        "scaling": "strong" if settings.strong else "weak",
        "batch": recipe.batch,
        "global_batch": recipe.batch * recipe.accumulate * workers,
        "parameters": model.parameters,
        "tensors": model.tensors,
        "dtype": recipe.dtype,
        "input": "synthetic" if recipe.input is None else "folder",
        "accumulate": recipe.accumulate,
        "compression": recipe.compression,
        "bucket_size_mb": recipe.bucket_size_mb,
    }


def _require_memory(teams: list[Team], title: str, hosts: list[str]) -> None:
    """Refuse to start a team for which there is no room beside those that are there.

    A worker takes about as much as the largest one so far.

    Args:
        teams: That are there.
        title: Of the new one.
        hosts: Of each of its workers.
    """
    hellos = [hello for team in teams for hello in team.hello]
    needed = max(Counter(hosts).values()) * max(hello["peak_rss_bytes"] for hello in hellos)
    available = min(hello["available_bytes"] for hello in teams[-1].hello)
    if needed > available:
        raise HvdkitError(
            f"no memory for {title}: about {needed / 2**30:.1f} GiB a host are needed and "
            f"{available / 2**30:.1f} GiB are free, while {sum(team.size for team in teams)} "
            "workers of other candidates wait; measure fewer candidates or numbers of workers in "
            "one call, or choose a smaller batch"
        )
