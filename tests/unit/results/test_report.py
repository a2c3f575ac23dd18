"""What a report says, against the results that it was made from."""

import importlib
import re
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from hvdkit.cli import main
from hvdkit.results.files import make_result, make_series, read_result
from hvdkit.results.report.build import build_report
from hvdkit.results.report.markdown import write_markdown
from hvdkit.results.report.page import write_page
from hvdkit.results.report.parts import BarChart, LineChart
from tests.unit.results.golden_files import FOLDER, PATHS, load, save

SVG = "{http://www.w3.org/2000/svg}"


def find_charts(report, kind):
    return [one for part in report.sections for one in part.charts if isinstance(one, kind)]


def parse_charts(page):
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_throughput_and_efficiency_are_those_of_the_result():
    runs = read_result(FOLDER / "train.json")["summary"]["runs"]
    lines = find_charts(build_report([FOLDER / "train.json"]), LineChart)
    assert [one.title for one in lines] == [
        f"{what}, {model}, weak scaling"
        for model in ("mlp", "many-small")
        for what in ("Throughput", "Efficiency")
    ]
    for chart in lines:
        for line in chart.lines:
            chosen = [r for r in runs if f" {r['model']}," in chart.title]
            chosen = [r for r in chosen if r["candidate"] == line.name]
            values = [r["samples_per_s"] for r in chosen]
            if chart.title.startswith("Efficiency"):
                values = [1, *(r["scaling_efficiency"] for r in chosen[1:])]
            assert (list(line.xs), list(line.ys)) == ([1, 2], values)


@pytest.mark.parametrize("name", ["train", "train-input"])
def test_the_parts_of_a_step_add_up_to_it(name):
    report = build_report([FOLDER / f"{name}.json"])
    runs = read_result(FOLDER / f"{name}.json")["summary"]["runs"]
    charts = find_charts(report, BarChart)
    totals = [sum(parts) for chart in charts for parts in zip(*chart.parts.values(), strict=True)]
    assert sorted(totals) == pytest.approx(sorted(1e3 * run["step_time_s"] for run in runs))
    for chart in charts:
        assert list(chart.parts) == ["computing", "exposed communication"] + (
            ["input wait"] if name == "train-input" else []
        )
        for row, time_ms in zip(chart.rows, chart.parts["exposed communication"], strict=True):
            assert (time_ms > 0) == ("2 w." in row and "single" not in row)


def test_without_single_nothing_is_told_apart(tmp_path):
    result = load("train")
    for run in result["summary"]["runs"]:
        run["communication_share"] = None
    report = build_report([save(tmp_path, result)])
    for chart in find_charts(report, BarChart):
        unknown = chart.parts["computing and communication, not told apart"]
        for row, time_ms in zip(chart.rows, unknown, strict=True):
            assert (time_ms is not None) == ("2 w." in row and "single" not in row)


def test_files_of_one_driver_are_side_by_side_and_named(tmp_path):
    other = save(tmp_path, load("train"), "other.json")
    report = build_report([FOLDER / "train.json", other])
    chart = find_charts(report, LineChart)[0]
    names = [line.name for line in chart.lines]
    assert names == [
        f"{file}, {candidate}"
        for file in ("train.json", "other.json")
        for candidate in ("hvdkit", "ddp", "horovod", "single")
    ]
    text = write_markdown(report)
    assert "### other.json over train.json" in text
    assert text.count("| fine |") == 12  # two models, two numbers of workers, without single
    assert not any("may not be compared" in one for one in report.warnings)


def test_files_of_one_name_are_named_by_their_paths(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [save(tmp_path / folder, load("allreduce"), "r.json") for folder in ("a", "b")]
    chart = find_charts(build_report(paths), LineChart)[0]
    assert [line.name for line in chart.lines if line.name.endswith("hvdkit")] == [
        f"{path}, hvdkit" for path in paths
    ]
    assert len(build_report([paths[0], paths[0]]).sections[0].tables[0].rows) == 1


def test_weak_and_strong_are_drawn_apart_and_said_with_each_number(tmp_path):
    report = build_report([FOLDER / "train.json", FOLDER / "train-input.json"])
    for section in report.sections[1:]:
        for table in section.tables:
            if "scaling" in table.headings:
                column = list(table.headings).index("scaling")
                expected = "strong" if "strong" in section.title else "weak"
                assert {row[column] for row in table.rows} == {expected}
                assert expected in table.title
    assert any("strong" in one.title for one in report.sections)


def test_a_driver_that_is_not_known_is_shown_by_its_samples(tmp_path):
    series = [
        make_series("wait_s", "s", [[[0.25, 0.5, 0.75]]], lower_is_better=True, host=host)
        for host in ("a", "b")
    ]
    path = save(tmp_path, make_result("tomorrow", {}, series, {"anything": None}))
    section = build_report([path]).sections[-1]
    assert section.tables[0].rows == [
        ("wait_s", "host a", "s", "0.5"),
        ("wait_s", "host b", "s", "0.5"),
    ]


def test_every_chart_is_drawn_and_says_what_it_shows():
    report = build_report(PATHS)
    charts = [one for section in report.sections for one in section.charts]
    drawn = parse_charts(write_page(report))
    assert len(drawn) == len(charts) > 10
    for chart, root in zip(charts, drawn, strict=True):
        assert root.get("role") == "img"
        named = [root.find(f"{SVG}{tag}") for tag in ("title", "desc")]
        assert root.get("aria-labelledby").split() == [one.get("id") for one in named]
        assert named[0].text == chart.title
        texts = {one.text.strip() for one in root.iter(f"{SVG}text") if one.text}
        names = chart.parts if isinstance(chart, BarChart) else [one.name for one in chart.lines]
        assert set(names) <= texts
        colours = {
            found for one in root.iter() for found in re.findall(r"#[0-9a-f]{6}", str(one.attrib))
        }  # fmt: skip
        assert len(colours) >= min(len(names), 6)
        assert "mathdefault" not in " ".join(texts)


def test_ids_of_a_page_are_unique_and_references_lead_somewhere():
    page = write_page(build_report(PATHS))
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = re.findall(r'url\(#([^)"]+)\)|href="#([^"]+)"|aria-labelledby="([^"]+)"', page)
    found = {one for each in references for text in each for one in text.split()}
    assert len(found) > 30
    assert found <= set(ids)


NASTY = (
    "$\\frac{$<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&_|*`\x00\ud800"
)


def spread(value, nasty):
    """Append a text to every string that is not a date or one of a fixed set."""
    if isinstance(value, dict):
        fixed = {"scaling", "batch_rule", "driver", "schema", "created"}
        return {k: v if k in fixed else spread(v, nasty) for k, v in value.items()}
    if isinstance(value, list):
        return [spread(one, nasty) for one in value]
    return value + nasty if isinstance(value, str) else value


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_texts_of_results_are_only_texts(tmp_path, path):
    result = spread(load(path.stem), NASTY)
    if path.stem == "converge":
        result["summary"]["target"] = {"digits" + NASTY: 0.95}
    report = build_report([save(tmp_path, result, "_<b>$x$.json")])
    page = write_page(report)
    page.encode("utf-8")
    plain = write_page(build_report([path]))

    def list_tags(text):
        return set(re.findall(r"<([a-z]+)", text))

    assert list_tags(page) <= list_tags(plain) | {"strong", "p"}
    assert "script" not in list_tags(page)
    assert "\x00" not in page
    assert "&lt;script&gt;" in page
    for root in parse_charts(page):  # still well-formed
        assert root.tag == f"{SVG}svg"
    text = write_markdown(report)
    assert not re.search(r"<[a-z]", text)
    for line in text.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)
            assert cells[0] == cells[-1] == ""
    widths = [
        (len(table.headings), {len(row) for row in table.rows})
        for section in report.sections
        for table in section.tables
    ]
    assert all(rows == {headings} for headings, rows in widths)


def test_markdown_has_ratios_with_intervals():
    text = write_markdown(build_report([FOLDER / "train.json"]))
    (ratio,) = [
        one
        for one in read_result(FOLDER / "train.json")["summary"]["ratios"]
        if (one["model"], one["workers"], one["candidate"]) == ("mlp", 2, "hvdkit")
        and one["reference"] == "ddp"
    ]
    shown = f"{ratio['estimate']:.3f} \\[{ratio['low']:.3f}, {ratio['high']:.3f}\\]"
    assert f"| hvdkit / ddp | 2 | {shown} |" in text
    assert "![" not in text


def invoke(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_nothing_is_overwritten_unless_forced(tmp_path):
    output = tmp_path / "r.md"
    assert invoke(PATHS[0], "-o", output).exit_code == 0
    first = output.read_text()
    done = invoke(PATHS[1], "-o", output)
    assert done.exit_code == 1
    assert "is there already: name another file, or pass --force" in done.output
    assert output.read_text() == first
    assert invoke(PATHS[1], "-o", output, "--force").exit_code == 0
    assert output.read_text() != first


def test_the_kind_follows_from_the_name(tmp_path):
    assert invoke(PATHS[0], "-o", tmp_path / "r.htm").exit_code == 0
    assert (tmp_path / "r.htm").read_text().startswith("<!DOCTYPE html>")
    assert invoke(PATHS[0], "-o", tmp_path / "r.txt", "--markdown").exit_code == 0
    assert (tmp_path / "r.txt").read_text().startswith("## hvdkit report")
    done = invoke(PATHS[0], "-o", tmp_path / "r.pdf")
    assert done.exit_code == 2
    assert "*.html or *.md" in done.output
    assert invoke("-o", tmp_path / "x.md").exit_code == 2


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_named_and_markdown_needs_none(tmp_path, monkeypatch, library):
    class Hide(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == library:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in importlib.sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(importlib.sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [Hide(), *importlib.sys.meta_path])
    done = invoke(PATHS[0], "-o", tmp_path / "r.html")
    assert done.exit_code == 1
    assert f"Error: a page needs {library}, which is not installed" in done.output
    assert "pip install 'hvdkit[report]'" in done.output
    assert invoke(PATHS[0], "-o", tmp_path / "r.md").exit_code == 0
