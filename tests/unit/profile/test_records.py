"""Reading records: other layouts, damage, and what is no timeline at all."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import HvdkitError
from hvdkit.profile import records
from hvdkit.profile.records import Damage, read_records
from hvdkit.profile.summary import summarize
from tests.unit.profile.timelines import RECORDED

EVERY = RECORDED / "every_negotiation.json"


def read(path):
    damage = Damage()
    return list(read_records(path, damage)), damage


@pytest.mark.parametrize("chunk_bytes", [64, 1001, 1 << 20])
def test_records_are_those_that_json_reads(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk_bytes)
    expected = json.loads(EVERY.read_text())
    expected[2]["args"] = {"name": "größe.重み"}
    variants = {
        "dense.json": json.dumps(expected, separators=(",", ":"), ensure_ascii=False),
        "pretty.json": json.dumps(expected, indent=2),
        "object.json": json.dumps({"traceEvents": expected}),
    }
    for name, text in variants.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read(tmp_path / name) == (expected, Damage())
    packed = tmp_path / "timeline.json.gz"
    packed.write_bytes(gzip.compress(variants["dense.json"].encode()))
    assert read(packed) == (expected, Damage())
    packed.write_bytes(packed.read_bytes()[:-200])
    found, damage = read(packed)
    assert damage.truncated
    assert found == expected[: len(found)]


def test_a_name_that_horovod_did_not_escape_costs_its_records_only(tmp_path):
    text = EVERY.read_text()
    path = tmp_path / "quoted.json"
    path.write_text(text.replace("optimizer0.plan0.presence", 'optimizer"0.plan0.presence'))
    found, damage = read(path)
    assert len(found) == len(json.loads(text)) - 1
    assert damage == Damage(truncated=False, skipped=1)
    summary = summarize(path).summary
    assert any("no records" in note for note in summary["notes"])
    assert summary["stragglers"]["negotiations"]["straggler"] == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"epoch,loss\n1,2\n", "is no timeline"),
        (b'{"schema": "hvdkit.result"}', "is no timeline"),
        (b"\x00" * 5000, "is no timeline"),
        (b"[]", "is no timeline of Horovod"),
        (b"[1, 2, 3]", "is no timeline of Horovod"),
        (b'[{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 7}]', "of Horovod"),
        (b"[" * 100_000, "is no timeline of Horovod"),
        (b"\x1f\x8b garbage", "is empty"),
    ],
)
def test_what_is_no_timeline_is_said_to_be_none(tmp_path, content, words):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(HvdkitError, match=words):
        summarize(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(HvdkitError, match="cannot read"):
        summarize(tmp_path / "none.json")
    with pytest.raises(HvdkitError, match="cannot read"):
        summarize(tmp_path)


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "B", "name": "ALLREDUCE", "ts": NaN, "pid": 7}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 1e999, "pid": 7}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": -5, "pid": 7}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 1' + "0" * 300 + ', "pid": 7}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 1' + "0" * 9000 + ', "pid": 7}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": "soon", "pid": 7}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 2569640, "pid": [1]}',
        '{"ph": "B", "name": null, "ts": 2569640, "pid": 7}',
        '{"ph": "E", "ts": 2569640, "pid": 4711}',
        '{"ph": "Q", "ts": 2569640, "pid": 7}',
        '{"ph": "X", "name": "one", "ts": 2569640, "pid": 7}',
        '{"ph": ["B"]}',
        "17",
    ],
)
def test_an_event_without_sense_is_left_out_and_counted(tmp_path, event):
    text = EVERY.read_text()
    place = text.index('{"ph": "B", "name": "ALLREDUCE", "ts": 2569759')
    path = tmp_path / "odd.json"
    path.write_text(text[:place] + event + "," + text[place:])
    summary = summarize(path).summary
    notes = summary.pop("notes")
    expected = summarize(EVERY).summary
    assert len(notes) == len(expected.pop("notes")) + 1
    assert summary == expected


@given(st.data())
def test_lost_bytes_never_break_it(tmp_path_factory, data):
    text = EVERY.read_bytes()
    begin = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 3000))
    filler = data.draw(st.sampled_from([b"", b"\x00" * 50, b'"', b"}{", b"]"]))
    path = tmp_path_factory.mktemp("lost") / "timeline.json"
    path.write_bytes(text[:begin] + filler + text[begin + length :])
    try:
        summary = summarize(path).summary
    except HvdkitError:
        return
    assert summary["operations"] <= summarize(EVERY).summary["operations"]
    for tensor in summary["tensors"]:
        assert all(phase["mean_s"] >= 0 for phase in tensor["phases"].values())
