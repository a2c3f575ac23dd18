"""``hvdkit doctor``: options that do not go together are one line."""

import pytest
from click.testing import CliRunner

from hvdkit.cli import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hosts", "a:1", "--hostfile", "hosts"), "give one of them"),
        (("--ssh-port", "22"), "--ssh-port is for several hosts"),
        (("--network-interfaces", "eth0"), "--network-interfaces is for several hosts"),
        (("--timeout", "1"), "--timeout is for several hosts"),
        (("--hosts", "a"), "'a' is no host of the form NAME:SLOTS"),
        (("--hostfile", "/nowhere/hosts"), "/nowhere/hosts cannot be read"),
    ],
)
def test_bad_options(options, words):
    done = CliRunner().invoke(main, ["doctor", *options])
    assert done.exit_code != 0
    assert words in done.output
    assert "Traceback" not in done.output
