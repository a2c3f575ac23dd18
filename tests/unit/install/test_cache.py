"""The wheel cache: what is stored is found, what is damaged is not, one builder at a time."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hvdkit.install.cache import WheelCache, cache_root


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)
    return path


@pytest.fixture
def cache(tmp_path):
    return WheelCache(tmp_path / "cache")


def test_an_empty_cache_finds_nothing(cache):
    assert cache.find("k1") is None


def test_a_stored_wheel_is_found_under_its_key_and_name(cache, wheel):
    stored = cache.store("k1", wheel, {"torch": "2.13.0"})
    assert stored.name == wheel.name
    assert stored.read_bytes() == wheel.read_bytes()
    assert cache.find("k1") == stored
    assert cache.find("k2") is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "record"])
def test_a_damaged_wheel_is_not_found_and_can_be_replaced(cache, wheel, damage):
    stored = cache.store("k1", wheel, {})
    content = stored.read_bytes()
    if damage == "truncate":
        stored.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        stored.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    elif damage == "remove":
        stored.unlink()
    else:
        (stored.parent / "record.json").write_text("{")
    assert cache.find("k1") is None
    assert cache.store("k1", wheel, {}) == stored
    assert cache.find("k1") == stored


def test_a_wheel_that_is_no_zip_is_not_found_though_its_digest_fits(cache, tmp_path):
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"not a zip")
    cache.store("k1", wheel, {})
    assert cache.find("k1") is None


def test_storing_leaves_nothing_half_done(cache, wheel):
    cache.store("k1", wheel, {})
    assert [path.name for path in cache.wheels.iterdir()] == ["k1"]


def test_the_lock_makes_a_second_process_wait(cache, tmp_path):
    """The second process says that it waits, and gets the lock once the first lets go."""
    script = (
        "import sys; from pathlib import Path; from hvdkit.install.cache import WheelCache\n"
        "with WheelCache(Path(sys.argv[1])).lock('k1', lambda: print('waiting', flush=True)):\n"
        "    print('held', flush=True)\n"
    )
    with cache.lock("k1", lambda: pytest.fail("nobody else holds it")):
        second = subprocess.Popen(
            [sys.executable, "-c", script, str(cache.root)],
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert second.stdout.readline() == "waiting\n"
        assert second.poll() is None
    assert second.communicate(timeout=30)[0] == "held\n"


def test_locks_of_other_keys_do_not_wait(cache):
    with cache.lock("k1", pytest.fail), cache.lock("k2", pytest.fail):
        pass


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HVDKIT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache/hvdkit"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg/hvdkit"
    monkeypatch.setenv("HVDKIT_CACHE_DIR", "~/own")
    assert cache_root() == tmp_path / "own"
