"""The Slurm that all tests here share."""

import pytest

from tests.cluster.slurm import serve


@pytest.fixture(scope="session")
def slurm():
    with serve() as running:
        yield running
