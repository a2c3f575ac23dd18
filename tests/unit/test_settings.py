"""What benchmarks write about a machine and adapters read."""

import json

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.settings import (
    Settings,
    find_path,
    pick_bucket_bytes,
    read_settings,
    write_settings,
)
from hvdkit.tuning import prefer_settings

MEASURED = Settings(bucket_size_mb=4.0, cycle_time_ms=0.5)


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_SETTINGS", str(tmp_path / "folder" / "settings.json"))
    return {"HVDKIT_SETTINGS": str(tmp_path / "folder" / "settings.json")}


def test_what_is_written_is_read(environ):
    assert read_settings(environ) == Settings()
    path = write_settings(MEASURED, environ)
    assert path == find_path(environ)
    assert read_settings(environ) == MEASURED
    assert [one.name for one in path.parent.iterdir()] == ["settings.json"]


def test_the_file_lies_where_configuration_does(tmp_path):
    home, config = str(tmp_path / "home"), str(tmp_path / "config")
    assert find_path({"HOME": home}) == tmp_path / "home/.config/hvdkit/settings.json"
    found = find_path({"HOME": home, "XDG_CONFIG_HOME": config})
    assert found == tmp_path / "config/hvdkit/settings.json"
    assert find_path({"HOME": home, "HVDKIT_SETTINGS": "/a/b"}).as_posix() == "/a/b"


def test_a_bucket_is_what_was_asked_for_then_what_was_measured(environ):
    assert pick_bucket_bytes(None) == 8 << 20
    write_settings(MEASURED, environ)
    assert pick_bucket_bytes(None) == 4 << 20
    assert pick_bucket_bytes(1.5) == 3 << 19


def test_horovod_is_told_the_cycle_time_unless_the_user_has(environ):
    write_settings(MEASURED, environ)
    for chosen, expected in (({}, "0.5"), ({"HOROVOD_CYCLE_TIME": "7"}, "7")):
        variables = {**environ, **chosen}
        prefer_settings(variables)
        assert variables["HOROVOD_CYCLE_TIME"] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ("[]", "must hold bucket_size_mb and cycle_time_ms alone"),
        (json.dumps({"speed": 1}), "must hold bucket_size_mb"),
        (json.dumps({"bucket_size_mb": "8"}), "bucket_size_mb must be a number above 0, not '8'"),
        (json.dumps({"bucket_size_mb": True}), "not True"),
        (json.dumps({"cycle_time_ms": 0}), "cycle_time_ms must be a number above 0, not 0"),
        (json.dumps({"cycle_time_ms": float("nan")}), "above 0, not nan"),
    ],
)
def test_a_damaged_file_says_what_to_do(environ, text, message):
    path = find_path(environ)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(HvdkitError, match=message) as caught:
        pick_bucket_bytes(None)
    assert "remove it, or write it anew with: hvdkit bench allreduce --write-config" in str(
        caught.value
    )


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HvdkitError, match="cannot write"):
        write_settings(MEASURED, {"HVDKIT_SETTINGS": str(tmp_path / "file" / "settings.json")})
