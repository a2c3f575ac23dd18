"""The Horovod that is installed in this environment, read from its files; nothing is imported."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from hvdkit.install.build import BUILD_RECORD
from hvdkit.install.frameworks import DISTRIBUTIONS

__all__ = ["InstalledHorovod", "find_horovod"]

_LIBRARIES = {"torch": "horovod/torch/mpi_lib_v2", "tensorflow": "horovod/tensorflow/mpi_lib"}


@dataclass(frozen=True)
class InstalledHorovod:
    """An installed Horovod.

    Attributes:
        version: Its version.
        path: The folder of the package.
        libraries: Framework name to the native library that serves it.
        record: What hvdkit wrote when it built the wheel; empty for any other build.
        lost: Files that pip installed and that are gone.
    """

    version: str
    path: Path
    libraries: Mapping[str, Path]
    record: Mapping[str, object] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    @property
    def built_against(self) -> dict[str, str]:
        """Framework name to the version that the libraries were built against, where known."""
        versions = self.record.get("frameworks")
        if isinstance(versions, dict):
            return {str(name): str(version) for name, version in versions.items()}
        return _read_metadata(self.path / "metadata.json")


def find_horovod() -> InstalledHorovod | None:
    """Return the Horovod of this environment, or None."""
    try:
        distribution = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file("horovod")))
    libraries: dict[str, Path] = {}
    lost = []
    # Not distribution.files: from Python 3.12 on it leaves out the files that are gone.
    for file, *_ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        place = Path(str(distribution.locate_file(file)))
        kept = place.suffix in (".py", ".so", ".json") or place.name == "horovodrun"
        if kept and not place.is_file():
            lost.append(file)
        for name, stem in _LIBRARIES.items():
            if file.startswith(stem + ".") and place.suffix == ".so" and place.is_file():
                libraries[name] = place
    ordered = {name: libraries[name] for name in _LIBRARIES if name in libraries}
    return InstalledHorovod(
        distribution.version, path, ordered, _read_record(path / BUILD_RECORD), tuple(lost)
    )


def _read_record(path: Path) -> dict[str, object]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _read_metadata(path: Path) -> dict[str, str]:
    """Read the versions that Horovod's own build wrote ("pytorch", "tensorflow")."""
    names = {"pytorch": "torch"}
    return {
        names.get(name, name): str(version)
        for name, version in _read_record(path).items()
        if names.get(name, name) in DISTRIBUTIONS
    }
