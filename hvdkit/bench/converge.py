"""How far and how fast training gets with more workers: accuracy over samples and time.

With one worker as the reference, each number of workers is tried with the same global batch, which
must give the same curve, and with a batch that grows with the workers, with each rule for the
learning rate; every one with several seeds, because one run says little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvdkit.bench.crew import Crew
from hvdkit.bench.settings import require_known, require_positive, require_workers
from hvdkit.bench.tasks import TASKS
from hvdkit.bench.team import Team
from hvdkit.errors import HvdkitError
from hvdkit.results.files import make_result, make_series
from hvdkit.results.fingerprint import read_fingerprint
from hvdkit.schedule import RULES, scaling_factor

__all__ = ["Settings", "Variant", "find_first", "measure", "summarize"]

READY_S = 300
FRAMEWORKS = ("torch", "tensorflow")
METRICS = {"accuracy": ("", False), "samples_seen": ("samples", True), "time_s": ("s", True)}


@dataclass(frozen=True)
class Variant:
    """A way to train with several workers.

    Attributes:
        workers: Number of them.
        batch_rule: "fixed" for a global batch that stays, "scaled" for one that grows.
        learning_rate_rule: What the rate is scaled by: one of ``hvdkit.schedule.RULES``.
    """

    workers: int
    batch_rule: str
    learning_rate_rule: str


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        framework: "torch" or "tensorflow" (Keras 3).
        tasks: Names from ``TASKS``.
        workers: Numbers of workers.
        rules: Of the learning rate where the batch grows.
        seeds: How many.
        batch: Samples a step of one worker; None for the task's own.
        learning_rate: For that batch; None for the task's own.
        target: Accuracy to reach; None for the task's own.
        samples: To train on at most; None for the task's own.
        threads: Compute threads a worker.
    """

    framework: str = "torch"
    tasks: tuple[str, ...] = ("digits",)
    workers: tuple[int, ...] = (1, 2)
    rules: tuple[str, ...] = RULES
    seeds: int = 3
    batch: int | None = None
    learning_rate: float | None = None
    target: float | None = None
    samples: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        """Refuse names that do not exist, and numbers out of their range."""
        require_known("framework", (self.framework,), FRAMEWORKS)
        require_known("tasks", self.tasks, TASKS)
        require_known("rules", self.rules, RULES)
        require_positive(self, "seeds", "threads")
        require_workers(self.workers)
        if self.target is not None and not 0 < self.target <= 1:
            raise HvdkitError(f"an accuracy is above 0 and at most 1; got {self.target}")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise HvdkitError(f"a learning rate must be above 0; got {self.learning_rate}")
        for task in self.tasks:
            for variant in self.list_variants():
                self.make_request(task, variant, 0)

    def list_variants(self) -> list[Variant]:
        """Return the ways to train; with one worker all rules are the same."""
        variants = []
        for workers in self.workers:
            variants.append(Variant(workers, "fixed", "none"))
            if workers > 1:
                variants += [Variant(workers, "scaled", rule) for rule in self.rules]
        return variants

    def make_request(self, task: str, variant: Variant, seed: int) -> dict[str, Any]:
        """Return what a worker is asked for."""
        described = TASKS[task]
        batch = self.batch or described.batch
        rate = self.learning_rate or described.learning_rate
        if variant.batch_rule == "fixed":
            batch, rest = divmod(batch, variant.workers)
            if rest or not batch:
                raise HvdkitError(
                    f"a batch of {self.batch or described.batch} cannot be divided among "
                    f"{variant.workers} workers; choose a multiple with --batch-size"
                )
        samples = self.samples or described.samples
        if samples < described.every:
            raise HvdkitError(f"{task} is evaluated each {described.every} samples; got {samples}")
        return {
            "batch": batch,
            "learning_rate": rate * scaling_factor(variant.workers, variant.learning_rate_rule),
            "samples": samples,
            "every": described.every,
            "seed": seed,
        }

    def count_turns(self) -> int:
        """Return how many trainings the measurement takes."""
        return len(self.tasks) * len(self.list_variants()) * self.seeds


def measure(settings: Settings, crew: Crew, report: Callable[[str, int], None]) -> dict[str, Any]:
    """Train every variant with every seed; return the result, ready for ``write_result``.

    Args:
        settings: What to measure.
        crew: At least as many slots as there are workers.
        report: Called with what goes on now and the number of trainings done since.

    Raises:
        HvdkitError: Workers broke off.
    """
    machine = read_fingerprint()
    series: list[dict[str, Any]] = []
    targets = {}
    for task in settings.tasks:
        targets[task] = settings.target or TASKS[task].target
        curves = _train_all(task, settings, crew, report)
        for variant, seeds in curves.items():
            labels = _make_labels(task, variant, settings)
            for metric, (unit, lower) in METRICS.items():
                samples = [[curve[metric]] for curve in seeds]
                series.append(make_series(metric, unit, samples, lower_is_better=lower, **labels))
    summary = summarize(series, targets)
    return make_result("converge", asdict(settings), series, summary, machine)


def _train_all(
    task: str, settings: Settings, crew: Crew, report: Callable[[str, int], None]
) -> dict[Variant, list[dict[str, list[float]]]]:
    teams: dict[int, Team] = {}
    for workers in settings.workers:
        title = f"{task}, {workers} worker(s)"
        report(f"{title}: start", 0)
        told = {"framework": settings.framework, "task": task, "threads": settings.threads}
        module = "hvdkit.bench.converge_worker"
        teams[workers] = crew.start(title, module, told, size=workers, threads=settings.threads)
        teams[workers].wait_until_ready(READY_S)
    curves: dict[Variant, list[dict[str, list[float]]]] = {}
    for seed in range(settings.seeds):
        for variant in settings.list_variants():
            request = settings.make_request(task, variant, seed)
            answers = teams[variant.workers].ask(request)
            curves.setdefault(variant, []).append(answers[0])
            report(f"{task}, {variant.workers} worker(s), seed {seed}", 1)
    for team in teams.values():
        team.finish()
    return curves


def _make_labels(task: str, variant: Variant, settings: Settings) -> dict[str, Any]:
    request = settings.make_request(task, variant, 0)
    return {
        "framework": settings.framework,
        "task": task,
        **asdict(variant),
        "batch": request["batch"],
        "global_batch": request["batch"] * variant.workers,
        "learning_rate": request["learning_rate"],
        "threads": settings.threads,
    }


def summarize(series: Sequence[Mapping[str, Any]], targets: Mapping[str, float]) -> dict[str, Any]:
    """Say when each variant reached its task's target.

    Args:
        series: Of a result: accuracy, samples_seen and time_s, as [seed][0][evaluation].
        targets: Accuracy by task.

    Returns:
        ``target`` by task, and ``runs``: labels, ``seeds``, ``reached`` (how many of these),
        ``samples_to_target`` and ``time_to_target_s`` (medians over those that reached it, None
        unless most did), ``final_accuracy`` (median).
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in series:
        key = tuple(one["labels"].items())
        found.setdefault(key, {})[one["metric"]] = [ranks[0] for ranks in one["samples"]]
    runs = []
    for key, curves in found.items():
        labels = dict(key)
        firsts = [find_first(curve, targets[labels["task"]]) for curve in curves["accuracy"]]
        reached = [(seed, at) for seed, at in enumerate(firsts) if at is not None]
        run = {**labels, "seeds": len(firsts), "reached": len(reached)}
        most = 2 * len(reached) > len(firsts)
        for name, metric in (("samples_to_target", "samples_seen"), ("time_to_target_s", "time_s")):
            values = [curves[metric][seed][at] for seed, at in reached]
            run[name] = median(values) if most else None
        run["final_accuracy"] = median(curve[-1] for curve in curves["accuracy"])
        runs.append(run)
    return {"target": dict(targets), "runs": runs}


def find_first(accuracies: Sequence[float], target: float) -> int | None:
    """Return the first evaluation at which an accuracy was reached; None if there is none."""
    return next((index for index, value in enumerate(accuracies) if value >= target), None)
