"""Files that were written before are read for as long as the schema version stays."""

import json

import pytest
from click.testing import CliRunner

import hvdkit.results.files as files
from hvdkit.cli import main
from hvdkit.errors import HvdkitError
from hvdkit.results.comparison import MIN_ROUNDS, compare_results, find_mismatches
from hvdkit.results.files import SCHEMA_VERSION, check_summary, read_result
from hvdkit.results.report.build import build_report
from hvdkit.results.report.markdown import write_markdown
from tests.unit.results.golden_files import DRIVERS, FOLDER, PATHS, load, save


def read(name):
    return read_result(FOLDER / f"{name}.json")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_schema_reads_what_was_written_before(path):
    """When this fails, the schema has changed so that users' files are lost.

    Then raise SCHEMA_VERSION, and record golden files of that version beside these.
    """
    result = json.loads(path.read_text())
    if result["schema_version"] == SCHEMA_VERSION:
        assert read_result(path) == result
        check_summary(result, str(path))
    else:
        with pytest.raises(HvdkitError, match="use the hvdkit that wrote it"):
            read_result(path)


def test_a_narrower_schema_of_the_same_version_is_noticed(monkeypatch):
    schema = files._read_schema()
    schema["properties"]["machine"]["required"].append("accelerators")
    monkeypatch.setattr(files, "_read_schema", lambda: schema)
    with pytest.raises(HvdkitError, match="accelerators"):
        read_result(PATHS[0])


def test_each_driver_has_a_file_of_this_version():
    found = [read_result(path) for path in PATHS]
    assert {one["driver"] for one in found} == DRIVERS
    assert {one["schema_version"] for one in found} == {SCHEMA_VERSION}
    definitions = files._read_schema()["$defs"]
    assert {f"summary_{driver}" for driver in DRIVERS} <= set(definitions)
    for driver in DRIVERS:
        assert f"\n{driver} " in files.__doc__


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_result_is_as_good_as_itself(path):
    result = read_result(path)
    assert find_mismatches(result, result) == []
    comparisons = compare_results(result, result)
    assert comparisons
    for one in comparisons:
        assert one.ratio.estimate == 1
    enough = len(result["series"][0]["samples"]) >= MIN_ROUNDS
    verdicts = {one.verdict for one in comparisons} - {"pace"}
    assert verdicts == {"fine" if enough else "not enough data"}


def test_the_report_of_all_has_a_section_for_each_driver():
    text = write_markdown(build_report(PATHS))
    for title in ("cnn (torch): strong", "mlp (torch): weak", "All-reduce of float32, 2 workers"):
        assert f"### {title}" in text
    for title in ("Convergence, digits", "Prediction", "Profile"):
        assert f"### {title}\n" in text


# What may be wrong with a file, and what is then said.
CHANGES = {
    "other version": (lambda r: r.update(schema_version=2), "has schema version 2"),
    "no version": (lambda r: r.pop("schema_version"), "has schema version None"),
    "NaN": (lambda r: spoil(r, float("nan")), "holds NaN where a number belongs"),
    "infinity": (lambda r: spoil(r, float("inf")), "holds Infinity where a number belongs"),
    "no samples": (lambda r: r["series"][0].update(samples=[]), r"$.series[0].samples: [] should"),
    "no ranks": (lambda r: r["series"][0].update(samples=[[]]), r"$.series[0].samples[0]: []"),
    "no steps": (lambda r: r["series"][0].update(samples=[[[]]]), r"$.series[0].samples[0][0]"),
    "a missing sample": (lambda r: spoil(r, None), "$.series[0].samples[0][0][0]: None is not"),
    "an enormous number": (lambda r: spoil(r, 10**400), "where a number belongs"),
    "no machine": (lambda r: r.pop("machine"), "'machine' is a required property"),
}


def spoil(result, sample):
    result["series"][0]["samples"][0][0][0] = sample


def run(command, path, tmp_path):
    """Run compare or report on a file; return exit status and what was printed."""
    if command == "compare":
        done = CliRunner().invoke(main, ["compare", str(path), str(path)])
    else:
        done = CliRunner().invoke(main, ["report", str(path), "-o", str(tmp_path / "out.md")])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1
    assert len(done.output) < 600
    assert not (tmp_path / "out.md").exists()
    assert done.exit_code == (3 if command == "compare" else 1)
    return done.output


BOTH = pytest.mark.parametrize("command", ["compare", "report"])


@BOTH
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["train", "allreduce", "converge", "predict", "profile"])
def test_a_changed_file_is_refused(tmp_path, name, change, command):
    result = load(name)
    apply, message = CHANGES[change]
    apply(result)
    path = save(tmp_path, result)
    output = run(command, path, tmp_path)
    assert str(path) in output
    assert message in output


@BOTH
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_file_that_was_cut_off_is_refused(tmp_path, path, command):
    data = path.read_bytes().rstrip()
    cut = tmp_path / "cut.json"
    for part in range(25):
        cut.write_bytes(data[: len(data) * part // 25])
        assert "was its writing cut short?" in run(command, cut, tmp_path)
    cut.write_bytes(data[:-1])
    run(command, cut, tmp_path)


@BOTH
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe{}", "can't decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"x": ' * 100_000, "nested too deeply"),
        (b'{"x": 1e999}', "holds 1e999 where a number belongs"),
        (b'{"x": -' + b"9" * 5000 + b"}", "where a number belongs"),
        (b"null", "is no result of hvdkit"),
        (b"\0" * 4096, "is no JSON"),
    ],
)
def test_what_is_no_result_at_all_is_refused(tmp_path, data, message, command):
    path = tmp_path / "a.json"
    if data is not None:
        path.write_bytes(data)
    assert message in run(command, path, tmp_path)


@BOTH
def test_a_folder_is_refused(tmp_path, command):
    assert "Is a directory" in run(command, tmp_path, tmp_path)


MIXED = {
    "processor": (lambda m: m.update(processor="abacus"), "processor: ", " and abacus"),
    "cores": (lambda m: m.update(cores=96), "cores: 2 and 96", ""),
    "accelerators": (lambda m: m.update(accelerators=["H200"]), "accelerators: ", "['H200']"),
    "python": (lambda m: m.update(python="3.0"), "python: ", " and 3.0"),
    "torch": (lambda m: m["versions"].update(torch="1.0"), "version of torch: ", " and 1.0"),
}


@pytest.mark.parametrize("field", MIXED)
def test_results_of_two_machines_are_not_compared_and_are_marked(tmp_path, field):
    result = load("train")
    change, *words = MIXED[field]
    change(result["machine"])
    path = save(tmp_path, result)
    done = CliRunner().invoke(main, ["compare", str(FOLDER / "train.json"), str(path)])
    assert done.exit_code == 3
    for word in words:
        assert word in done.output
    warning, *_ = build_report([FOLDER / "train.json", path]).warnings
    assert "may not be compared" in warning
    for word in words:
        assert word in warning


def test_markup_in_a_label_is_shown_by_compare(tmp_path):
    result = load("train")
    for series in result["series"]:
        series["labels"]["model"] += " [/bold] [red]"
    path = save(tmp_path, result)
    done = CliRunner().invoke(main, ["compare", str(path), str(path)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert "mlp [/bold] [red]" in done.output


SUMMARIES = {
    "train": (lambda s: s["runs"][3].pop("step_time_s"), "$.summary.runs[3]: 'step_time_s' is a"),
    "allreduce": (lambda s: s["messages"][0].update(size_bytes=0), "messages[0].size_bytes: 0"),
    "converge": (lambda s: s.update(runs=None), "$.summary.runs: None is not of type 'array'"),
    "predict": (lambda s: s["points"].clear(), "$.summary.points: [] should be non-empty"),
    "profile": (lambda s: s["runs"][0]["steps"].clear(), "runs[0].steps: 'phases' is a required"),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_that_cannot_be_shown_is_named(tmp_path, name):
    result = load(name)
    change, message = SUMMARIES[name]
    change(result["summary"])
    path = save(tmp_path, result)
    assert message in run("report", path, tmp_path)
    read_result(path)  # to compare, samples are enough
