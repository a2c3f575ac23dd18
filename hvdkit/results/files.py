"""Results as files: one JSON schema for every driver, ``schema.json`` beside this file.

Every driver writes all of its samples, as series, and a summary of its own:

========= ============================================ ==========================================
driver    series, as [round][rank][sample]             summary
========= ============================================ ==========================================
train     step_s, input_s: of a step                   runs, ratios, geometric_means, hosts
allreduce allreduce_s: of an operation                 messages, fits, bucket_size_bytes
converge  accuracy, samples_seen, time_s, as           target, runs
          [seed][0][evaluation]
predict   predicted_step_s, as [0][0][replicate]       points, model, measured, origins,
                                                       assumptions
profile   step_s and a phase each: of a step           runs
========= ============================================ ==========================================

``schema.json`` describes the summaries too, under ``$defs``. A reader demands only the series, so
that a summary may gain fields without a new schema version; ``check_summary`` demands the fields
that a report shows. A change of the schema by which a file that was written before is no longer
read needs a new ``SCHEMA_VERSION``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import __version__
from hvdkit.errors import HvdkitError
from hvdkit.results.fingerprint import read_fingerprint

__all__ = [
    "SCHEMA_VERSION",
    "check_result",
    "check_summary",
    "make_result",
    "make_series",
    "read_result",
    "require_writable",
    "write_result",
    "write_text",
]

SCHEMA = "hvdkit.result"
SCHEMA_VERSION = 1


def make_series(
    metric: str,
    unit: str,
    samples: Sequence[Sequence[Sequence[float]]],
    *,
    lower_is_better: bool,
    **labels: Any,
) -> dict[str, Any]:
    """Return one series of a result.

    Args:
        metric: What was measured, its unit as a suffix: ``step_s``.
        unit: For people: ``s``.
        samples: As [round][rank][sample].
        lower_is_better: Whether a larger value is a regression.
        labels: What it was measured of: model, workers, batch and so on.
    """
    return {
        "metric": metric,
        "unit": unit,
        "lower_is_better": lower_is_better,
        "labels": labels,
        "samples": [[list(rank) for rank in ranks] for ranks in samples],
    }


def make_result(
    driver: str,
    settings: Mapping[str, Any],
    series: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    machine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a result, ready for ``write_result``.

    Args:
        driver: The name of the command that measured.
        settings: What it was asked for.
        series: As from ``make_series``.
        summary: What it made of them.
        machine: As from ``read_fingerprint``, which is called for None; best read before the
            measurement, so that its load is that of other programs.
    """
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "driver": driver,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hvdkit": __version__,
        "machine": dict(read_fingerprint() if machine is None else machine),
        "settings": dict(settings),
        "series": [dict(one) for one in series],
        "summary": dict(summary),
    }


def check_result(result: Any, source: str) -> None:
    """Raise unless ``result`` is what ``schema.json`` describes.

    Args:
        result: What JSON made of a file.
        source: The file, for the message.

    Raises:
        HvdkitError: Says what is wrong and where in the result.
    """
    # Here, so that hvdkit's help does not wait for it.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise HvdkitError(f"{source} is no result of hvdkit; make one with `hvdkit bench`")
    version = result.get("schema_version")
    if version != SCHEMA_VERSION:
        raise HvdkitError(
            f"{source} has schema version {version}, and this hvdkit ({__version__}) reads "
            f"version {SCHEMA_VERSION}: use the hvdkit that wrote it, or measure again"
        )
    error = best_match(Draft202012Validator(_read_schema()).iter_errors(result))
    if error is not None:
        raise HvdkitError(
            f"{source} is not a whole result: {error.json_path}: {_shorten(error.message)}"
        )


def check_summary(result: Mapping[str, Any], source: str) -> None:
    """Raise unless the summary has what ``schema.json`` says of its driver's.

    The summary of a driver that is not described there may be anything.

    Args:
        result: Read and checked.
        source: The file, for the message.

    Raises:
        HvdkitError: Says what is wrong and where in the result.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    definitions = _read_schema()["$defs"]
    name = f"summary_{result['driver']}"
    if name not in definitions:
        return
    schema = {"$ref": f"#/$defs/{name}", "$defs": definitions}
    error = best_match(Draft202012Validator(schema).iter_errors(result["summary"]))
    if error is not None:
        where = error.json_path.replace("$", "$.summary", 1)
        raise HvdkitError(
            f"{source} has a summary that `hvdkit report` cannot show: {where}: "
            f"{_shorten(error.message)}; measure again with hvdkit {__version__}"
        )


def _read_schema() -> dict[str, Any]:
    path = Path(__file__).with_name("schema.json")
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return schema


def _shorten(message: str) -> str:
    """Keep a message on one line: it may hold half of a file."""
    return message if len(message) <= 200 else f"{message[:120]} ... {message[-80:]}"


def read_result(path: Path) -> dict[str, Any]:
    """Read and check a result.

    Raises:
        HvdkitError: The file cannot be read, is cut off or damaged, holds numbers that are none
            (NaN, infinity), or has another schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error  # neither a number nor the path again
        raise HvdkitError(f"cannot read {path}: {reason}") from None

    def refuse(constant: str) -> None:
        raise HvdkitError(f"{path} holds {constant} where a number belongs: measure again")

    def parse(digits: str, kind: Callable[[str], Any]) -> Any:
        # Of more digits than a float has room for, Python would make infinity or an integer that
        # no float is equal to.
        if not math.isfinite(float(digits)):
            refuse(_shorten(digits))
        return kind(digits)

    try:
        result = json.loads(
            text,
            parse_constant=refuse,
            parse_float=lambda digits: parse(digits, float),
            parse_int=lambda digits: parse(digits, int),
        )
    except json.JSONDecodeError as error:
        raise HvdkitError(
            f"{path} is no JSON (line {error.lineno}: {error.msg}); was its writing cut short?"
        ) from None
    except RecursionError:
        raise HvdkitError(f"{path} is no result of hvdkit: it is nested too deeply") from None
    check_result(result, str(path))
    assert isinstance(result, dict)
    return result


def require_writable(path: Path, *, force: bool) -> None:
    """Refuse a file that cannot be written, before minutes of measurement are done for it.

    Raises:
        HvdkitError: The folder is missing or read-only, or the file is there and ``force`` is
            not given.
    """
    if path.is_dir():
        raise HvdkitError(f"{path} is a folder; name a file in it")
    if path.exists() and not force:
        raise HvdkitError(f"{path} is there already: name another file, or pass --force")
    part = _name_part(path)
    try:
        part.touch()  # permissions alone do not tell: /proc, a full disk, a read-only one
        part.unlink()
    except OSError as error:
        raise HvdkitError(f"cannot write {path}: {error.strerror}") from None


def write_result(path: Path, result: Mapping[str, Any], *, force: bool = False) -> None:
    """Write a result whole or not at all.

    Raises:
        HvdkitError: As ``require_writable`` and ``check_result``, or the disk is full.
        ValueError: The result holds NaN or infinity.
    """
    require_writable(path, force=force)
    check_result(result, "what was measured")
    write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n", force=force)


def write_text(path: Path, text: str, *, force: bool = False) -> None:
    """Write a text in UTF-8, whole or not at all.

    Raises:
        HvdkitError: As ``require_writable``, or the disk is full.
    """
    require_writable(path, force=force)
    part = _name_part(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise HvdkitError(f"cannot write {path}: {error.strerror}") from error


def _name_part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")
