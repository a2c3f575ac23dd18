"""Horovod's source distribution: got through pip or from a file, verified, unpacked."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from hvdkit.errors import BuildError

__all__ = ["HOROVOD_VERSION", "SDIST_NAME", "SDIST_SHA256", "fetch_sdist", "unpack", "verify"]

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def fetch_sdist(folder: Path, python_path: str = "") -> Path:
    """Return the verified source distribution in ``folder``, fetching it if it is not there.

    Args:
        folder: Where it is kept.
        python_path: Folders for PYTHONPATH in which pip finds setuptools, when the environment
            has none: pip runs setup.py to learn the metadata.

    Raises:
        BuildError: pip could not get it, or its SHA-256 is not that of the release.
    """
    kept = folder / SDIST_NAME
    if kept.is_file():
        try:
            verify(kept)
            return kept
        except BuildError:
            kept.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    fetched = folder / f"fetch-{os.getpid()}"
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"),
        # No isolation: isolated, pip would fetch build tools that are not needed to download.
        *("--no-deps", "--no-binary", "horovod", "--no-build-isolation"),
        *("--dest", str(fetched), f"horovod=={HOROVOD_VERSION}"),
    ]
    environment = dict(os.environ)
    if python_path:
        environment["PYTHONPATH"] = python_path
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, errors="replace"
        )
        archive = fetched / SDIST_NAME
        if done.returncode or not archive.is_file():
            lines = [line for line in done.stderr.splitlines() if "WARNING" not in line.upper()]
            raise BuildError(
                f"pip could not download horovod=={HOROVOD_VERSION}: "
                f"{' '.join(lines[-2:]) or 'it gave no reason'}. Check pip's index settings, or "
                f"give the file with --sdist {SDIST_NAME}."
            )
        verify(archive)
        os.replace(archive, kept)
    finally:
        shutil.rmtree(fetched, ignore_errors=True)
    return kept


def verify(archive: Path) -> None:
    """Check that a file is the source distribution that hvdkit knows.

    Raises:
        BuildError: It cannot be read, or its SHA-256 differs.
    """
    try:
        with archive.open("rb") as file:
            found = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        raise BuildError(f"Cannot read {archive}: {error.strerror}.") from None
    if found != SDIST_SHA256:
        raise BuildError(
            f"{archive} is not the source distribution of Horovod {HOROVOD_VERSION}: its SHA-256 "
            f"is {found}, expected {SDIST_SHA256}. Download it again, unmodified."
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a verified source distribution into a folder; return the root of the source."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # the first releases of Python 3.10 and 3.11; the archive's digest was verified
            tar.extractall(folder)
    return folder / f"horovod-{HOROVOD_VERSION}"
