"""What was measured where, and what keeps the results of a report from being compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.results.comparison import find_machine_mismatches
from hvdkit.results.report.numbers import show
from hvdkit.results.report.parts import Named, Section, Table

__all__ = ["describe_conditions", "find_warnings"]

# Load a core from which on other programs disturbed a measurement.
BUSY = 0.25


def find_warnings(results: Sequence[Named]) -> list[str]:
    """Say which results come from other machines than the first, and where it was busy."""
    first, *others = results
    warnings = []
    for named in others:
        lines = find_machine_mismatches(first.result, named.result)
        if lines:
            warnings.append(
                f"{named.name} was not measured under the conditions of {first.name}, so their "
                f"numbers may not be compared: {'; '.join(lines)}."
            )
    busy = [
        f"{named.name} (load {machine['load']:.1f} on {machine['cores']} cores)"
        for named in results
        if (machine := named.result["machine"])["load"] > BUSY * machine["cores"]
    ]
    if busy:
        warnings.append(
            f"Other programs were running when these began: {', '.join(busy)}. Expect wide "
            "intervals, or measure again when idle."
        )
    return warnings


def describe_conditions(results: Sequence[Named]) -> Section:
    """Return the section on files and machines."""
    machines: dict[str, Mapping[str, Any]] = {}
    rows = []
    for named in results:
        machine = named.result["machine"]
        name = _write_machine(machine)
        machines.setdefault(name, machine)
        letter = _name_machine(list(machines).index(name))
        created = named.result["created"].replace("T", " ").removesuffix("Z")
        files = named.name, named.result["driver"], letter, created, named.result["hvdkit"]
        rows.append((*files, f"{machine['load']:.2f}"))
    headings = ["file", "driver", "machine", "written (UTC)", "hvdkit", "load before"]
    tables = [Table("Results", headings, rows, 5)]
    cells = [
        (
            _name_machine(index),
            machine["processor"],
            str(machine["cores"]),
            show(machine["memory_bytes"] / 2**30),
            ", ".join(machine.get("accelerators", ())) or "none named",
            machine["system"],
            machine["python"],
            _write_versions(machine),
        )
        for index, machine in enumerate(machines.values())
    ]
    headings = ["machine", "processor", "cores", "memory (GiB)", "accelerators", "system"]
    headings += ["Python", "versions"]
    tables.append(Table("Machines and versions", headings, cells, len(headings)))
    return Section("What was measured where", tables=tables)


def _name_machine(index: int) -> str:
    return f"M{index + 1}"


def _write_versions(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())


def _write_machine(machine: Mapping[str, Any]) -> str:
    """Identify a machine by all that does not change from one run to the next."""
    return repr(sorted((name, value) for name, value in machine.items() if name != "load"))
