"""The engine, the base image and the image, each made once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.image.base_image import provide_base
from tests.image.build import ROOT, build, make_context, share_wheel
from tests.image.engine import Engine, running_engine
from tests.system.documents import take_block

# Where the size of the image and the seconds of its build are left for people to see.
RECORD = ROOT / "build/image.json"


@dataclass(frozen=True)
class Image:
    """The image under test.

    Attributes:
        engine: Who has it.
        tag: Its name there.
        context: What it was built from.
        version: What the build was told that the version is.
    """

    engine: Engine
    tag: str
    context: Path
    version: str


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    # Not in a folder of pytest: those of the last runs stay, and a whole engine is gigabytes.
    with (
        tempfile.TemporaryDirectory(prefix="hvdkit-image-", ignore_cleanup_errors=True) as name,
        running_engine(Path(name, "engine")) as running,
        provide_base(running, Path(name)),
    ):
        yield running


@pytest.fixture(scope="session")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image of docker/Dockerfile, built as docker/README.md says."""
    context = make_context(tmp_path_factory.mktemp("context"))
    shared = share_wheel(context, tmp_path_factory.mktemp("home"))
    version = "7.8.9"
    command = take_block("docker/README.md", "docker build -f").commands[0]
    # Empty: pip's own settings say where PyTorch comes from.
    output, build_s = build(engine, context, command, {"TORCH_INDEX_URL": "", "VERSION": version})
    size_bytes = int(engine.docker("inspect", "--format", "{{.Size}}", "hvdkit").stdout)
    # A wheel of the same versions must be taken, not compiled again.
    assert ("Found in the cache:" in output) == shared
    record = {"size_bytes": size_bytes, "build_s": round(build_s), "horovod_compiled": not shared}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nimage: {record}")
    return Image(engine, "hvdkit", context, version)
