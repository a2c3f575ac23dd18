"""Networks of hosts for the tests, and jobs that run on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.multihost.network import Network, join


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    """Mark tests that need network namespaces (tests/conftest.py)."""


@pytest.fixture(scope="session")
def alike(tmp_path_factory) -> Iterator[Network]:
    """Two hosts whose interfaces have the same name."""
    with join(tmp_path_factory.mktemp("alike"), ["eth0", "eth0"]) as network:
        yield network


@pytest.fixture(scope="session")
def unlike(tmp_path_factory) -> Iterator[Network]:
    """Two hosts whose interfaces have different names."""
    with join(tmp_path_factory.mktemp("unlike"), ["va", "vb"]) as network:
        yield network


@pytest.fixture
def breakable(tmp_path) -> Iterator[Callable[..., Network]]:
    """Give a function that makes a network that a test may break."""
    with contextlib.ExitStack() as stack:
        yield lambda *interfaces: stack.enter_context(join(tmp_path / "network", interfaces))
