"""Results of each driver, as they were recorded: see golden/README.md."""

import json
from pathlib import Path

FOLDER = Path(__file__).with_name("golden")
PATHS = sorted(FOLDER.glob("*.json"))
DRIVERS = {"train", "allreduce", "converge", "predict", "profile"}


def load(name):
    """Return what a golden file holds, to be changed."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def save(folder, result, name="changed.json"):
    """Write a result unchecked, as someone else might have; return where."""
    path = folder / name
    path.write_text(json.dumps(result))
    return path
