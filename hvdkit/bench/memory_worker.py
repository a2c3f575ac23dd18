"""Takes a step of a model and counts what it holds; ``hvdkit.bench.memory`` starts it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdkit.bench.memory import FRAMEWORKS, Settings
from hvdkit.errors import HvdkitError

__all__ = ["load"]


def load(path: str) -> Callable[..., Any]:
    """Return what MODULE:FUNCTION names; modules of the working directory are found too.

    Raises:
        HvdkitError: There is no such module or function.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise HvdkitError(f"cannot import {path}: {error}") from error
    if not callable(found):
        raise HvdkitError(f"{path} cannot be called: name a function or a class")
    result: Callable[..., Any] = found
    return result


def main() -> None:
    """Count what the arguments say; write the answer as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--answer", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, "")
    settings = Settings(**arguments.settings)
    framework = importlib.import_module(FRAMEWORKS[settings.framework])
    arguments.answer.write_text(json.dumps(framework.count(settings)), encoding="utf-8")


if __name__ == "__main__":
    main()
