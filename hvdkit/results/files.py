"""Results as files: one JSON schema for every driver, ``schema.json`` beside this file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import __version__
from hvdkit.errors import HvdkitError
from hvdkit.results.fingerprint import read_fingerprint

__all__ = [
    "SCHEMA_VERSION",
    "check_result",
    "make_result",
    "make_series",
    "read_result",
    "require_writable",
    "write_result",
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
    schema = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    error = best_match(Draft202012Validator(schema).iter_errors(result))
    if error is not None:
        raise HvdkitError(f"{source} is not a whole result: {error.json_path}: {error.message}")


def read_result(path: Path) -> dict[str, Any]:
    """Read and check a result.

    Raises:
        HvdkitError: The file cannot be read, is cut off or damaged, holds numbers that are none
            (NaN, infinity), or has another schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HvdkitError(f"cannot read {path}: {error}") from None

    def refuse(constant: str) -> None:
        raise HvdkitError(f"{path} holds {constant} where a number belongs: measure again")

    try:
        result = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise HvdkitError(
            f"{path} is no JSON (line {error.lineno}: {error.msg}); was its writing cut short?"
        ) from None
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
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    part = _name_part(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise HvdkitError(f"cannot write {path}: {error.strerror}") from error


def _name_part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")
