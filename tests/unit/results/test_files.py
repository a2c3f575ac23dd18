"""Results as files: what is written is read again, and what is wrong is said."""

import copy
import json

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.results.files import check_result, make_result, make_series, read_result, write_result


def make(**labels):
    series = make_series("step_s", "s", [[[0.1, 0.2], [0.1, 0.3]]], lower_is_better=True, **labels)
    return make_result("train", {"np": [2]}, [series], {})


def test_what_is_written_is_read_again(tmp_path):
    result = make(model="mlp", workers=2)
    path = tmp_path / "a.json"
    write_result(path, result)
    assert read_result(path) == result
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_overwritten_unless_forced(tmp_path):
    path = tmp_path / "a.json"
    write_result(path, make(model="mlp"))
    with pytest.raises(HvdkitError, match="is there already: name another file, or pass --force"):
        write_result(path, make(model="cnn"))
    assert read_result(path)["series"][0]["labels"] == {"model": "mlp"}
    write_result(path, make(model="cnn"), force=True)
    assert read_result(path)["series"][0]["labels"] == {"model": "cnn"}


@pytest.mark.parametrize("name", ["no/such/folder.json", "folder", "/proc/result.json"])
def test_where_nothing_can_be_written(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(HvdkitError, match=r"cannot write|is a folder"):
        write_result(tmp_path / name, make(), force=True)


def test_numbers_that_are_none_are_never_written(tmp_path):
    result = make()
    result["series"][0]["samples"][0][0][0] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(tmp_path / "a.json", result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no JSON"),
        ('{"schema": "hvdkit.result", "ser', "was its writing cut short"),
        ("[1, 2]", "is no result of hvdkit"),
        ('{"schema": "other"}', "is no result of hvdkit"),
        ('{"schema": "hvdkit.result", "schema_version": 2}', "schema version 2, and this hvdkit"),
        ('{"schema": "hvdkit.result", "schema_version": 1}', "not a whole result"),
        ('{"schema": "hvdkit.result", "x": NaN}', "holds NaN where a number belongs"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(HvdkitError, match=message) as raised:
        read_result(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(HvdkitError, match="No such file"):
        read_result(tmp_path / "none.json")
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HvdkitError, match="cannot read"):
        read_result(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda r: r.pop("machine"), r"\$: 'machine' is a required property"),
        (lambda r: r["series"].clear(), r"\$\.series"),
        (lambda r: r["series"][0].update(samples=[[[]]]), r"\$\.series\[0\]\.samples"),
        (lambda r: r["series"][0].update(samples=[[["fast"]]]), r"samples\[0\]\[0\]\[0\]"),
        (lambda r: r["machine"].update(cores=0), r"\$\.machine\.cores"),
        (lambda r: r.update(created="yesterday"), r"\$\.created"),
        (lambda r: r.update(more=1), "more"),
    ],
)
def test_what_does_not_fit_the_schema_is_named(change, where):
    result = make()
    check_result(copy.deepcopy(result), "a")
    change(result)
    with pytest.raises(HvdkitError, match=where):
        check_result(json.loads(json.dumps(result)), "a")
