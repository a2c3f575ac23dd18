"""What the tests of the installer share."""

import sysconfig

import pytest


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in place of site-packages: nothing is installed but what a test puts there."""
    # The standard library stays: importlib.metadata imports parts of it when it needs them.
    folder = sysconfig.get_path("platstdlib")
    paths = [str(tmp_path), sysconfig.get_path("stdlib"), folder, f"{folder}/lib-dynload"]
    monkeypatch.setattr("sys.path", paths)
    return tmp_path
