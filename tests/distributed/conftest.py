"""Distributed tests need an installed Horovod; without one they skip, or fail where demanded."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def _missing() -> str | None:
    """Say what keeps ``horovodrun`` from running PyTorch workers; None when nothing does.

    Looks at files only: the test process itself loads neither Horovod nor a framework.
    """
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return "horovod is not installed (run: hvdkit install)"
    folder = Path(next(iter(spec.submodule_search_locations)), "torch")
    if not list(folder.glob("mpi_lib_v2*.so")):
        return "horovod is built without PyTorch (run: hvdkit install)"
    return None


@pytest.fixture(scope="session", autouse=True)
def horovod_present() -> None:
    """Skip, or fail where ``HVDKIT_REQUIRE`` names ``distributed``, when Horovod is missing."""
    missing = _missing()
    if missing is None:
        return
    if "distributed" in os.environ.get("HVDKIT_REQUIRE", "").split(","):
        pytest.fail(f"HVDKIT_REQUIRE demands the distributed tests, but {missing}")
    pytest.skip(missing)
