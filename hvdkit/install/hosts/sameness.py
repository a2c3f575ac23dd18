"""What must be the same on all hosts: Python, hvdkit, the frameworks, and Horovod's build."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdkit.install.hosts.report import HostFinding, HostReport

__all__ = ["compare_environments", "describe_environment"]

_REMEDY = "have the same Python environment on each host: copy it, share it, or install it again"
_BUILD_REMEDY = (
    "install one wheel on all of them: hvdkit install --wheel-dir DIR, then pip install --no-deps"
)


def compare_environments(reports: Sequence[HostReport]) -> Iterator[HostFinding]:
    """Yield a fault for each part of the environment that is not the same everywhere.

    Patch releases of Python and builds of one framework version for other hardware may differ.
    """
    parts = {
        report.name: _list_parts(report.answer) for report in reports if report.answer is not None
    }
    for topic in dict.fromkeys(topic for entries in parts.values() for topic in entries):
        holders: dict[str, list[str]] = {}
        for name, entries in parts.items():
            if entries:
                holders.setdefault(entries.get(topic, "none"), []).append(name)
        if len(holders) < 2:
            continue
        # The version that most have comes first; where as many have another, the first host's.
        ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
        text = "; ".join(f"{version} on {', '.join(names)}" for version, names in ordered)
        odd = tuple(name for _, names in ordered[1:] for name in names)
        build = topic == "Horovod's build"
        yield HostFinding(
            odd, topic, "fault", f"{topic}: {text}", _BUILD_REMEDY if build else _REMEDY
        )


def describe_environment(report: HostReport) -> str:
    """Return a host's versions as text."""
    parts = _list_parts(report.answer or {})
    return ", ".join(f"{topic} {text}" for topic, text in parts.items() if "'" not in topic)


def _list_parts(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return topic to version; nothing where hvdkit does not run, which is a fault of its own."""
    doctor = answer.get("doctor")
    if not doctor:
        return {}
    parts = {
        "Python": ".".join(answer["python"].split(".")[:2]),
        "hvdkit": doctor["hvdkit"],
        **{name: text.partition("+")[0] for name, text in doctor["frameworks"].items()},
        "Horovod": doctor["horovod"] or "none",
    }
    if doctor["horovod"]:
        parts["Horovod's build"] = _describe_build(doctor)
    return parts


def _describe_build(doctor: Mapping[str, Any]) -> str:
    record = doctor["build"]
    against = ", ".join(f"{name} {text}" for name, text in doctor["built_against"].items())
    if "hvdkit" not in record:
        return f"not by hvdkit, against {against or 'unknown versions'}"
    edits = record.get("edits", [])
    features = [*record.get("controllers", []), record.get("gpu") or "CPU"]
    if record.get("mpi"):
        features.append(f"MPI {record['mpi']}")
    return (
        f"by hvdkit {record['hvdkit']} with {len(edits)} edits for {', '.join(features)}, "
        f"against {against}"
    )
