"""The script behind `make matrix`: what counts as run and as passed."""

import json
import sys

import pytest

from tests import matrix

VERSION = "{}.{}".format(*sys.version_info[:2])
REPORT = '<testsuites><testsuite tests="{}" skipped="{}" failures="0" errors="0"/></testsuites>'


def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path, monkeypatch):
    broken, works = tmp_path / "broken", tmp_path / "works"
    for folder, script in ((broken, "exit 127"), (works, f'exec {sys.executable} "$@"')):
        folder.mkdir()
        program = folder / f"python{VERSION}"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken}:{works}")
    assert matrix.find_interpreter(VERSION) == str(works / f"python{VERSION}")
    monkeypatch.setenv("PATH", str(broken))
    assert matrix.find_interpreter(VERSION) is None


def test_a_row_without_its_interpreter_is_not_run_and_does_not_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "HOME", tmp_path)
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["matrix", "torch-2.13.0"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert matrix.main() == 0
    result = json.loads((tmp_path / "results.json").read_text())["torch-2.13.0"]
    assert result["outcome"] == "not run"
    assert "not run (no python3.11 on PATH)" in capsys.readouterr().out


def test_a_failed_step_ends_the_row_shows_its_log_and_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "HOME", tmp_path)
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["matrix", "torch-2.13.0"])
    monkeypatch.setattr(matrix, "find_interpreter", lambda version: sys.executable)
    failing = "print('the reason'); raise SystemExit(3)"
    monkeypatch.setattr(
        matrix,
        "list_steps",
        lambda *arguments: iter([("check", [sys.executable, "-c", failing], None)]),
    )
    assert matrix.main() == 1
    output = capsys.readouterr().out
    assert "failed (check: exit code 3)" in output
    assert "| the reason" in output
    assert str(tmp_path / "torch-2.13.0/check.log") in output


def test_a_run_that_skipped_every_test_has_not_passed(tmp_path):
    report = tmp_path / "tests.xml"
    report.write_text(REPORT.format(3, 3))
    with pytest.raises(matrix.StepError, match="no test passed, 3 were skipped"):
        matrix._read_tests(report)
    report.write_text(REPORT.format(3, 1))
    assert matrix._read_tests(report) == "2 passed, 1 skipped"
