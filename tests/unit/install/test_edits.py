"""Compatibility edits: conditions, exact application, and the records themselves."""

import pytest

from hvdkit.errors import BuildError
from hvdkit.install.compatibility import EDITS
from hvdkit.install.edits import Edit, Target, When, apply_edits, digest, select_edits
from hvdkit.install.versions import release


def make_edit(**changes):
    values = {
        "name": "widen",
        "path": "a/b.txt",
        "expected": "narrow",
        "replacement": "wide",
        "reason": "it is narrow",
        "reference": "upstream#1",
    }
    return Edit(**{**values, **changes})


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.21.0rc1", (2, 21, 0)), ("3", (3,)), ("v1.2", (1, 2))],
)
def test_release(text, numbers):
    assert release(text) == numbers


def test_release_of_no_version():
    with pytest.raises(ValueError, match="unknown"):
        release("unknown")


@pytest.mark.parametrize(
    ("when", "version", "holds"),
    [
        (When(), None, True),
        (When("torch"), None, False),
        (When("torch"), "1.5.0", True),
        (When("torch", at_least=(2, 1)), "2.0.1", False),
        (When("torch", at_least=(2, 1)), "2.1.0+cu121", True),
        (When("torch", at_least=(2, 9)), "2.13.0", True),
        (When("torch", below=(2, 20)), "2.20.0", False),
        (When("torch", at_least=(2, 19), below=(2, 20)), "2.19.1", True),
    ],
)
def test_conditions(when, version, holds):
    assert when.holds(Target({"torch": version} if version else {})) is holds


def test_an_edit_replaces_exactly_its_text(tmp_path):
    path = tmp_path / "a/b.txt"
    path.parent.mkdir()
    path.write_text("one narrow street\n")
    apply_edits(tmp_path, [make_edit()])
    assert path.read_text() == "one wide street\n"


@pytest.mark.parametrize("text", ["nothing here", "narrow and narrow"])
def test_text_that_is_not_there_once_is_an_error_with_the_name(tmp_path, text):
    path = tmp_path / "a/b.txt"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BuildError, match=rf"'widen'.*a/b\.txt.*found {text.count('narrow')} times"):
        apply_edits(tmp_path, [make_edit()])
    assert path.read_text() == text


def test_a_missing_file_is_an_error_with_the_name(tmp_path):
    with pytest.raises(BuildError, match=r"'widen' needs a/b\.txt"):
        apply_edits(tmp_path, [make_edit()])


def test_an_edit_may_expect_its_text_several_times():
    assert make_edit(count=2).apply("narrow narrow") == "wide wide"


def test_the_digest_depends_on_what_changes_the_build():
    edit = make_edit()
    same = digest([edit])
    assert digest([make_edit(reason="another", reference="upstream#2")]) == same
    for changed in ({"path": "c"}, {"expected": "x"}, {"replacement": "y"}):
        assert digest([make_edit(**changed)]) != same
    assert digest([edit, edit]) != same
    assert digest([]) != same


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_every_record_is_whole(edit):
    assert edit.name == edit.name.lower().replace("_", "-")
    assert edit.expected
    assert edit.expected != edit.replacement
    assert edit.reason
    assert edit.reference
    assert edit.count >= 1


def test_names_are_unique():
    names = [edit.name for edit in EDITS]
    assert sorted(set(names)) == sorted(names)


def select_names(**versions):
    return {edit.name for edit in select_edits(EDITS, Target(versions))}


def test_which_edits_a_framework_brings():
    torch = select_names(torch="2.13.0")
    assert {"cxx17", "cxx17-torch", "python-headers", "gloo-stall-ranks"} <= torch
    assert not {name for name in torch if name.startswith(("xla", "tensorflow", "absl"))}
    assert "cxx17-torch" not in select_names(tensorflow="2.21.0")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.16.1", set()),
        ("2.18.0", set()),
        ("2.19.0", {"xla-builder-header", "xla-off-2.19"}),
        ("2.20.0", {"xla-builder-header"}),
        ("2.21.0", {"xla-builder-header", "tensorflow-bundled-headers"}),
    ],
)
def test_which_edits_a_tensorflow_release_brings(version, expected):
    varying = {"xla-builder-header", "xla-off-2.19", "tensorflow-bundled-headers"}
    found = select_names(tensorflow=version)
    assert found & varying == expected
    assert {"xla-gpu-only", "absl-status-or", "tensorflow-gpu-stream"} <= found


def test_the_gpu_stream_comes_from_the_public_handle():
    edit = next(edit for edit in EDITS if edit.name == "tensorflow-gpu-stream")
    assert "GpuStreamHandle AsGpuStreamValue(Stream* stream);" in edit.expected
    assert "platform_specific_handle().stream" in edit.replacement
    # The header must come before the definition that uses it.
    assert edit.replacement.index("stream.h") < edit.replacement.index("AsGpuStreamValue")
