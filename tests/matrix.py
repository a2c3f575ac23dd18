"""Build and test hvdkit in a fresh environment for each row of versions: ``make matrix``.

By hand, not in CI: a row takes minutes, and gigabytes while it runs. ``python tests/matrix.py
ROW ...`` runs some rows, ``--list`` names them. Everything goes under ``.matrix/``: the log of
each step, and ``results.json``, in which a row stays until it is run again.

Needs the standard library only, and the rows' interpreters on PATH as ``python3.X``. A row whose
interpreter is missing is "not run".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".matrix"
RESULTS = HOME / "results.json"
TAIL_LINES = 25
STEP_DEADLINE_S = 3600
# Settings of whoever runs this that would change what is installed, built or tested.
FOREIGN = re.compile(r"HOROVOD_\w+|HVDKIT_REQUIRE|PYTHON(PATH|HOME)|VIRTUAL_ENV|KERAS_\w+|TF_\w+")
SHOWN = ("tensorflow-cpu", "torch", "keras", "numpy", "horovod", "hvdkit")

CORE_TESTS = {
    "tensorflow": (
        "test_tensorflow.py",
        "test_keras.py",
        "-k",
        "tensorflow and not growth and not mixed_precision",  # long, and of no version
    ),
    "torch": ("test_equivalence.py", "test_optimizers.py", "test_semantics.py", "test_reported.py"),
}


@dataclass(frozen=True)
class Row:
    """One set of versions, for one framework alone.

    Attributes:
        name: How the command line and the results call it.
        framework: "tensorflow" or "torch"; says which tests are its core tests.
        python: The interpreter's version, for example "3.11".
        requirements: What pip is to install.
        compiles_nccl: Where there is an nvcc, also compile a Horovod with NCCL.
    """

    name: str
    framework: str
    python: str
    requirements: tuple[str, ...]
    compiles_nccl: bool = False


def _tensorflow(version: str, python: str = "3.11", *beside: str) -> Row:
    parts = [f"tensorflow-{version}", *(f"python{python}" for _ in range(python != "3.11"))]
    name = "-".join([*parts, *(requirement.replace("==", "-") for requirement in beside)])
    # The CPU packages are a third of the size; Horovod's build reads the same headers.
    return Row(name, "tensorflow", python, (f"tensorflow-cpu=={version}", *beside))


def _torch(version: str, compiles_nccl: bool = False) -> Row:
    return Row(f"torch-{version}", "torch", "3.11", (f"torch=={version}", "numpy"), compiles_nccl)


ROWS = (
    _tensorflow("2.16.2"),
    _tensorflow("2.16.2", "3.11", "keras==3.5.0"),  # the oldest that is not refused
    _tensorflow("2.18.1"),
    _tensorflow("2.20.0"),
    _tensorflow("2.21.0"),
    _tensorflow("2.21.0", "3.10"),
    _tensorflow("2.21.0", "3.12"),
    _tensorflow("2.21.0", "3.13"),
    _torch("2.13.0"),
    _torch("2.14.1", compiles_nccl=True),
)


class StepError(Exception):
    """A step of a row failed; the message says how."""


def main() -> int:
    """Run the rows that the command line names; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--keep", action="store_true", help="keep environments that passed, too")
    arguments = parser.parse_args()
    # Or the step under way would go on without this.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in arguments.rows if name not in known]:
        parser.error(f"no row {', '.join(unknown)}; there are: {', '.join(known)}")
    if arguments.list:
        print("\n".join(known))
        return 0
    chosen = [known[name] for name in arguments.rows] or list(ROWS)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for number, row in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {row.name}", flush=True)
        results[row.name] = run_row(row, arguments.keep)
        HOME.mkdir(exist_ok=True)
        results = {name: results[name] for name in known if name in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{make_table(results)}\n\n{RESULTS}")
    return int(any(results[row.name]["outcome"] == "failed" for row in chosen))


def run_row(row: Row, keep: bool) -> dict[str, object]:
    """Take a row through its steps, up to the first that fails; return what came of it."""
    result: dict[str, object] = {
        "outcome": "not run",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _ask("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": row.python,
    }
    interpreter = find_interpreter(row.python)
    if interpreter is None:
        result["reason"] = f"no python{row.python} on PATH"
        print(f"    not run: {result['reason']}", flush=True)
        return result
    folder = HOME / row.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    steps: dict[str, dict[str, object]] = {}
    result |= {"outcome": "passed", "steps": steps}
    for name, command, judge in list_steps(row, interpreter, folder):
        log = folder / f"{name}.log"
        print(f"    {name} ...", end=" ", flush=True)
        started = time.monotonic()
        failure = note = ""
        try:
            _run_step(command, folder, log)
            note = judge() if judge else ""
        except StepError as error:
            failure = str(error)
        seconds = round(time.monotonic() - started)
        steps[name] = {"outcome": "failed" if failure else "passed", "seconds": seconds}
        if failure or note:
            steps[name]["note"] = failure or note
        print(f"{seconds} s{f', {failure or note}' if failure or note else ''}", flush=True)
        if name == "packages" and not failure:
            result["versions"] = _read_versions(folder)
        if failure:
            result |= {"outcome": "failed", "reason": f"{name}: {failure}"}
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            print(*(f"    | {line}" for line in tail), f"    {log}", sep="\n", flush=True)
            return result
    if not keep:
        shutil.rmtree(folder / "venv")
    return result


def find_interpreter(version: str) -> str | None:
    """Return the first python3.X on PATH that runs and is that version.

    The first of that name need not be one: version managers put scripts there that only say
    that the version is not active.
    """
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        candidate = shutil.which(f"python{version}", path=folder)
        if candidate and _ask(candidate, "-c", code) == version:
            return candidate
    return None


def list_steps(
    row: Row, interpreter: str, folder: Path
) -> Iterator[tuple[str, list[str], Callable[[], str] | None]]:
    """Give each step's name, its command, and what judges it beside its exit code, if anything.

    The next step is asked for when the one before it is done.
    """
    python, hvdkit = str(folder / "venv/bin/python"), str(folder / "venv/bin/hvdkit")
    yield "environment", [interpreter, "-m", "venv", str(folder / "venv")], None
    packages = [*row.requirements, "hypothesis", "pytest", "--editable", str(ROOT)]
    yield "packages", [python, "-m", "pip", "install", *packages], None
    yield "install", [hvdkit, "install"], lambda: _read_wheel_source(folder / "install.log")
    yield "check", [hvdkit, "check"], None
    report = folder / "tests.xml"
    tests = [
        word if word.startswith("-") or "." not in word else f"tests/distributed/{word}"
        for word in CORE_TESTS[row.framework]
    ]
    command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
    yield "tests", command, lambda: _read_tests(report)
    if row.compiles_nccl and shutil.which("nvcc"):
        # Into a folder: there may be no GPU to prove it on.
        command = [hvdkit, "install", "--gpu", "nccl", "--wheel-dir", str(folder / "nccl")]
        yield "nccl", command, lambda: _read_wheel_source(folder / "nccl.log")


def _run_step(command: Sequence[str], folder: Path, log: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if not FOREIGN.fullmatch(name)}
    environment |= {
        "PATH": os.pathsep.join([str(folder / "venv/bin"), environment.get("PATH", os.defpath)]),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with log.open("wb") as sink:
        sink.write(f"# {' '.join(command)}\n".encode())
        sink.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(STEP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise StepError(f"still running after {STEP_DEADLINE_S} s") from None
        finally:
            _end(process)
    if code:
        raise StepError(f"exit code {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step that still runs; those commands end what they started when they get SIGTERM."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(30)
            return
        except subprocess.TimeoutExpired:
            continue


def _read_tests(report: Path) -> str:
    """Count the tests of a report; a run that skipped all of them has shown nothing."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count, skipped, failures, errors = (
        int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")
    )
    passed = count - skipped - failures - errors
    if passed <= 0:
        raise StepError(f"no test passed, {skipped} were skipped")
    return f"{passed} passed" + (f", {skipped} skipped" if skipped else "")


def _read_wheel_source(log: Path) -> str:
    found = "Found in the cache:" in log.read_text(encoding="utf-8", errors="replace")
    return "wheel from the cache" if found else "compiled"


def _read_versions(folder: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    found = json.loads(_ask(str(folder / "venv/bin/python"), "-c", code) or "{}")
    return {name: found[name] for name in SHOWN if name in found}


def _ask(*command: str) -> str:
    """Return what a program prints, "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def make_table(results: dict[str, dict[str, object]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| row | Python | Keras | outcome | tests | seconds | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        steps = result.get("steps", {})
        seconds = sum(step["seconds"] for step in steps.values())
        reason = f" ({result['reason']})" if "reason" in result else ""
        cells = [
            name,
            result["python"],
            result.get("versions", {}).get("keras", ""),
            f"{result['outcome']}{reason}",
            steps.get("tests", {}).get("note", ""),
            seconds or "",
            result["date"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
