"""Lists of hosts, as horovodrun takes them."""

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.install.hosts.listing import HostSlots, parse_hosts, read_host_file


def test_a_list():
    assert parse_hosts("a:4, b-1.example:12") == [HostSlots("a", 4), HostSlots("b-1.example", 12)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no host"),
        ("a", "'a' is no host"),
        ("a:4,", "'' is no host"),
        ("a:four", "'a:four' is no host"),
        ("a:-1", "'a:-1' is no host"),
        ("a b:1", "'a b:1' is no host"),
        ("-oProxyCommand=x:1", "is no host"),
        ("-v:1", "is no host"),
        ("a:0", "a has 0 slots"),
        ("a:1,b:1,a:2", "a is listed twice"),
    ],
)
def test_a_list_that_is_none(text, words):
    with pytest.raises(HvdkitError, match=words):
        parse_hosts(text)


def test_a_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=4\n10.0.0.2   slots=12  \n")
    assert read_host_file(path) == [HostSlots("a", 4), HostSlots("10.0.0.2", 12)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("a slots=4\n\n", "Line 2 of .* is ''"),
        ("# hosts\n", "Line 1 of .* is '# hosts'"),
        ("a\n", "Line 1"),
        ("a slots = 4\n", "Line 1"),
        ("a slots=4 max_slots=8\n", "Line 1"),
        ("a slots=4\na slots=4\n", "a is listed twice"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(HvdkitError, match=words):
        read_host_file(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(HvdkitError, match="cannot be read"):
        read_host_file(tmp_path / "hosts")
