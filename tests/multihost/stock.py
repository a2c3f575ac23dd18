"""The installed Horovod as one that hvdkit did not build: the same files, without its record."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

__all__ = ["lay_over"]

RECORD = "hvdkit_build.json"


def lay_over(folder: Path) -> Path:
    """Fill a folder that hides, on the path of modules, what is installed; return it."""
    distribution = metadata.distribution("horovod")
    package = folder / "horovod"
    package.mkdir(parents=True)
    for path in Path(str(distribution.locate_file("horovod"))).iterdir():
        if path.name != RECORD:
            (package / path.name).symlink_to(path)
    info = folder / f"horovod-{distribution.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(distribution.read_text("METADATA") or "")
    lines = (distribution.read_text("RECORD") or "").splitlines()
    kept = [line for line in lines if line.startswith("horovod/") and RECORD not in line]
    (info / "RECORD").write_text("\n".join(kept))
    return folder
