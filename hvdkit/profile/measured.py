"""What results of ``hvdkit bench train`` and ``allreduce`` measured of one model on one machine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hvdkit.errors import HvdkitError
from hvdkit.profile.scaling import Scaling

__all__ = ["Measured", "Rounds", "collect", "resample"]

# Seconds, as [round][rank][sample].
Rounds: TypeAlias = Sequence[Sequence[Sequence[float]]]

WIRE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
COMPRESSED = {"fp16": 2, "bf16": 2}
# Of the machine; versions of hvdkit and Horovod themselves may differ.
MACHINE = ("processor", "cores", "accelerators", "python")
FREE_VERSIONS = {"hvdkit", "horovod"}
# What must be the same in all series of training, but for what the prediction is about.
SAME = (
    "framework",
    "model",
    "parameters",
    "threads",
    "dtype",
    "input",
    "accumulate",
    "compression",
    "bucket_size_mb",
)


@dataclass(frozen=True)
class Measured:
    """Samples, by what they were measured at.

    Attributes:
        labels: Of the first series of training, most of which all have in common; empty if there
            are none.
        scaling: Of the training; weak, where both were measured.
        machine: The fingerprint.
        hosts: The largest number of hosts that a result was measured on.
        alone: Steps that reduce nothing, by workers and samples of each.
        together: Steps of the candidate, by the same.
        messages: All-reduces, by workers and size in bytes.
    """

    labels: Mapping[str, Any]
    scaling: Scaling
    machine: Mapping[str, Any]
    hosts: int = 1
    alone: Mapping[tuple[int, int], Rounds] = field(default_factory=dict)
    together: Mapping[tuple[int, int], Rounds] = field(default_factory=dict)
    messages: Mapping[tuple[int, int], Rounds] = field(default_factory=dict)

    @property
    def gradient_bytes(self) -> int:
        """What a step reduces, as it travels."""
        dtype, compression = self.labels["dtype"], self.labels.get("compression") or "none"
        if dtype not in WIRE_BYTES:
            raise HvdkitError(f"how large a gradient of {dtype} is, is not known: --dtype-bytes")
        wire = min(COMPRESSED.get(compression, 8), WIRE_BYTES[dtype])
        return int(self.labels["parameters"]) * wire

    @property
    def slots(self) -> int:
        """Workers that compute at full speed side by side: accelerators, or cores over threads."""
        accelerators = self.machine.get("accelerators")
        if accelerators:
            return len(accelerators)
        return max(1, int(self.machine["cores"]) // int(self.labels.get("threads", 1)))


def collect(
    results: Mapping[str, Mapping[str, Any]],
    *,
    candidate: str = "hvdkit",
    model: str | None = None,
    framework: str | None = None,
) -> Measured:
    """Take from results what the scaling model is fitted to.

    Args:
        results: Read and checked, by the name of their file.
        candidate: Whose steps and all-reduces.
        model: Which, where the results hold several.
        framework: The same.

    Raises:
        HvdkitError: The results are of different machines, versions, models or settings, of a
            driver that has nothing to fit, or hold durations that are not positive.
    """
    _require_one_machine(results)
    training, messages = [], []
    hosts = 1
    for name, result in results.items():
        if result["driver"] not in ("train", "allreduce"):
            raise HvdkitError(
                f"{name} is a result of {result['driver']!r}; a prediction is fitted to results of "
                "`hvdkit bench train` and `hvdkit bench allreduce`"
            )
        hosts = max(hosts, len(result["summary"].get("hosts", [])))
        for series in result["series"]:
            _require_positive(name, series)
            if series["metric"] == "step_s":
                training.append(series)
            elif series["metric"] == "allreduce_s" and series["labels"]["candidate"] == candidate:
                messages.append(series)
    training = [
        one
        for one in training
        if model in (None, one["labels"]["model"])
        and framework in (None, one["labels"]["framework"])
        and one["labels"]["candidate"] in (candidate, "single")
    ]
    _require_same(training, SAME)
    if (model or framework) and not training:
        raise HvdkitError(
            f"no result has steps of {candidate} on model {model or 'any'} in framework "
            f"{framework or 'any'}; name what was measured"
        )
    alone, together = (
        _gather(training, lambda labels: (labels["workers"], _count_samples(labels)), name)
        for name in ("single", candidate)
    )
    labels = training[0]["labels"] if training else {}
    if messages:
        # The cost of a byte may depend on the type that it is part of.
        dtypes = {one["labels"]["dtype"] for one in messages}
        dtype = labels.get("dtype") if labels.get("dtype") in dtypes else min(dtypes)
        messages = [one for one in messages if one["labels"]["dtype"] == dtype]
        _require_same(messages, ("tensors", "threads", "controller"))
    sizes = _gather(messages, lambda names: (names["workers"], names["size_bytes"]), candidate)
    scalings = {one["labels"]["scaling"] for one in training}
    return Measured(
        labels,
        "strong" if scalings == {"strong"} else "weak",
        next(iter(results.values()))["machine"],
        hosts,
        alone,
        together,
        sizes,
    )


def resample(measured: Measured, rng: random.Random) -> Measured:
    """Return a bootstrap replicate: rounds drawn with replacement.

    Candidates of one benchmark take turns in each round, so series with equally many rounds draw
    the same ones: what slows a whole round down then stays in the difference's both sides.
    """
    draws: dict[int, list[int]] = {}

    def draw(rounds: Rounds) -> Rounds:
        count = len(rounds)
        if count not in draws:
            draws[count] = rng.choices(range(count), k=count)
        return [rounds[index] for index in draws[count]]

    def draw_all(series: Mapping[tuple[int, int], Rounds]) -> dict[tuple[int, int], Rounds]:
        return {key: draw(rounds) for key, rounds in series.items()}

    return replace(
        measured,
        alone=draw_all(measured.alone),
        together=draw_all(measured.together),
        messages=draw_all(measured.messages),
    )


def _count_samples(labels: Mapping[str, Any]) -> int:
    """Return the samples that each worker takes in a step, of all its passes."""
    return int(labels["global_batch"]) // int(labels["workers"])


def _gather(series: Iterable[Mapping[str, Any]], key: Any, candidate: str) -> dict[Any, Rounds]:
    gathered: dict[Any, Rounds] = {}
    for one in series:
        if one["labels"]["candidate"] == candidate:
            where = key(one["labels"])
            gathered[where] = [*gathered.get(where, ()), *one["samples"]]
    return gathered


def _require_positive(name: str, series: Mapping[str, Any]) -> None:
    if not all(value > 0 for ranks in series["samples"] for rank in ranks for value in rank):
        raise HvdkitError(
            f"{name}: {series['metric']} holds a duration that is not above 0: measure again"
        )


def _require_one_machine(results: Mapping[str, Mapping[str, Any]]) -> None:
    (first, reference), *others = results.items()
    for name, result in others:
        pair = reference["machine"], result["machine"]
        differ = [field for field in MACHINE if pair[0].get(field) != pair[1].get(field)]
        versions = [one["versions"] for one in pair]
        differ += [
            package
            for package in sorted({*versions[0], *versions[1]} - FREE_VERSIONS)
            if versions[0].get(package) != versions[1].get(package)
        ]
        if differ:
            raise HvdkitError(
                f"{first} and {name} were measured under different conditions ({', '.join(differ)} "
                "differ): fit to results of one machine and one set of versions"
            )


def _require_same(series: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for name in names:
        values = sorted({str(one["labels"].get(name)) for one in series})
        if len(values) > 1:
            choose = f": choose one with --{name}" if name in ("model", "framework") else ""
            raise HvdkitError(
                f"the results hold several values of {name} ({', '.join(values)}); a prediction is "
                f"about one{choose}"
            )
