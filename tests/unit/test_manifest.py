"""Whatever happens to the bytes of a checkpoint, it is never taken for a whole one."""

import hashlib
import json
import random

import pytest

from hvdkit import __version__
from hvdkit.checkpoint import CheckpointStore
from hvdkit.errors import CheckpointError
from hvdkit.manifest import FORMAT, find_damage

SIZE_BYTES = 20_000


@pytest.fixture
def store(tmp_path):
    """A store with checkpoints of steps 1 and 2, the newer one to be damaged."""
    store = CheckpointStore(tmp_path)
    chance = random.Random(0)
    for step in (1, 2):
        data = chance.randbytes(SIZE_BYTES)
        store.write(step, lambda file, data=data: file.write(data), score=1e-7 * step)
    return store


def demand_fallback(store):
    with pytest.warns(UserWarning, match="damaged checkpoint: 00000002-step-2"):
        assert store.latest().step == 1


def test_the_manifest_says_what_wrote_it(store):
    newest = store.checkpoints()[-1]
    manifest = json.loads(newest.manifest_path.read_text())
    payload = newest.path.read_bytes()
    seal = manifest.pop("manifest_sha256")
    assert manifest == {
        "format": FORMAT,
        "framework": None,
        "hvdkit_version": __version__,
        "sequence": 2,
        "step": 2,
        "score": 2e-7,
        "payload": newest.path.name,
        "size_bytes": SIZE_BYTES,
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    assert seal == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def rewrite(checkpoint, **changes):
    """Write the manifest anew, whole; a change to None takes the entry away."""
    entries = json.loads(checkpoint.manifest_path.read_text()) | changes
    del entries["manifest_sha256"]
    entries = {key: value for key, value in entries.items() if value is not None}
    seal = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    text = json.dumps(entries | {"manifest_sha256": seal}, indent=2)
    checkpoint.manifest_path.write_text(text)


def test_the_first_format_is_read_and_a_later_one_refused(store):
    first, second = store.checkpoints()
    rewrite(first, format=1, framework=None, hvdkit_version=None, score=None)
    assert set(json.loads(first.manifest_path.read_text())) == {
        *("format", "sequence", "step", "payload", "size_bytes", "sha256", "manifest_sha256")
    }
    assert store.choose(step=1).path == first.path
    assert store.best().step == 2
    rewrite(second, format=FORMAT + 1)
    assert f"has format {FORMAT + 1}, this version of hvdkit reads 1 and 2" in find_damage(second)
    demand_fallback(store)


@pytest.mark.parametrize("entry", ["format", "payload", "size_bytes", "sha256"])
def test_a_manifest_that_lacks_an_entry_is_damage(store, entry):
    rewrite(store.checkpoints()[-1], **{entry: None})
    demand_fallback(store)


def test_a_payload_cut_at_every_kib_is_never_loaded(store):
    newest = store.checkpoints()[-1]
    data = newest.path.read_bytes()
    for size_bytes in range(0, SIZE_BYTES, 1024):
        newest.path.write_bytes(data[:size_bytes])
        demand_fallback(store)
        with pytest.raises(CheckpointError, match=f"has {size_bytes} of {SIZE_BYTES} bytes"):
            store.find(2)
    newest.path.write_bytes(data + b"\0")
    demand_fallback(store)
    newest.path.write_bytes(data)
    assert store.latest().step == 2


def test_a_manifest_cut_anywhere_is_never_loaded(store):
    newest = store.checkpoints()[-1]
    text = newest.manifest_path.read_bytes()
    for size_bytes in range(len(text)):
        newest.manifest_path.write_bytes(text[:size_bytes])
        assert find_damage(newest) is not None, size_bytes
    demand_fallback(store)


def flip(data, bits):
    changed = bytearray(data)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_payload_with_flipped_bits_is_never_loaded(store):
    newest = store.checkpoints()[-1]
    data = newest.path.read_bytes()
    chance = random.Random(1)
    for count in [1] * 200 + [2, 3, 8, 100] * 10:
        newest.path.write_bytes(flip(data, chance.sample(range(8 * len(data)), count)))
        demand_fallback(store)


def test_a_manifest_with_any_bit_flipped_is_never_loaded(store):
    newest = store.checkpoints()[-1]
    text = newest.manifest_path.read_bytes()
    for bit in range(8 * len(text)):
        newest.manifest_path.write_bytes(flip(text, [bit]))
        assert find_damage(newest) is not None, bit
    demand_fallback(store)
