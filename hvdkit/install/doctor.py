"""What `hvdkit doctor` examines: Horovod, its fit to the frameworks, its launcher.

Frameworks are never imported: their files, and Horovod's library alone, say all of it.
"""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import hvdkit
from hvdkit.install.findings import Finding
from hvdkit.install.frameworks import Framework, find_frameworks
from hvdkit.install.installed import InstalledHorovod, find_horovod
from hvdkit.install.probe import Probe, probe_libraries
from hvdkit.install.surroundings import examine_surroundings
from hvdkit.install.tools import find_missing_runtime

__all__ = ["examine", "examine_fit", "examine_horovod", "summarize"]

MEND = "hvdkit install"


def examine() -> list[Finding]:
    """Examine this environment and machine; takes a second or two."""
    frameworks = find_frameworks()
    horovod = find_horovod()
    probes = probe_libraries(horovod.libraries if horovod else {}, frameworks)
    return [
        Finding("python", "ok", f"Python {platform.python_version()}, {sys.executable}"),
        Finding("hvdkit", "ok", hvdkit.__version__),
        *_examine_frameworks(frameworks),
        *examine_horovod(horovod),
        *examine_fit(horovod, frameworks),
        *_examine_probes(horovod, probes),
        *_examine_launcher(horovod),
        *examine_surroundings(frameworks, probes),
    ]


def summarize() -> dict[str, object]:
    """Return what `--json` gives beside the findings: the bare facts, for a program to read."""
    frameworks = find_frameworks()
    horovod = find_horovod()
    return {
        "hvdkit": hvdkit.__version__,
        "python": platform.python_version(),
        "frameworks": {name: framework.version for name, framework in frameworks.items()},
        "horovod": horovod.version if horovod else None,
        "built_against": horovod.built_against if horovod else {},
        "build": dict(horovod.record) if horovod else {},
    }


def _examine_frameworks(frameworks: Mapping[str, Framework]) -> Iterator[Finding]:
    for framework in frameworks.values():
        cuda = f", CUDA {framework.cuda}" if framework.cuda else ""
        rocm = f", ROCm {framework.rocm}" if framework.rocm else ""
        build = cuda + rocm or ", CPU build"
        yield Finding(framework.name, "ok", f"{framework.version}{build}")
    if not frameworks:
        yield Finding(
            "frameworks", "fault", "neither torch nor tensorflow is installed", "pip install torch"
        )


def examine_horovod(horovod: InstalledHorovod | None) -> Iterator[Finding]:
    """Say whether Horovod is installed, whole, and with what it imports."""
    if horovod is None:
        yield Finding("horovod", "fault", "not installed in this environment", MEND)
        return
    versions = [f"{name} {version}" for name, version in horovod.built_against.items()]
    against = ", ".join(versions) or "unknown versions"
    if "hvdkit" in horovod.record:
        text = f"{horovod.version}, built by hvdkit {horovod.record['hvdkit']} against {against}"
        yield Finding("horovod", "ok", text)
    else:
        yield Finding(
            "horovod",
            "warning",
            f"{horovod.version}, built against {against}, not by hvdkit: as released, it never "
            "reports a stalled worker under Gloo",
            MEND,
        )
    if horovod.lost:
        yield Finding(
            "horovod",
            "fault",
            f"{len(horovod.lost)} of its files are gone, the first is {horovod.lost[0]}",
            MEND,
        )
    if missing := find_missing_runtime():
        yield Finding("horovod", "fault", f"it imports what is absent: {', '.join(missing)}", MEND)


def examine_fit(
    horovod: InstalledHorovod | None, frameworks: Mapping[str, Framework]
) -> Iterator[Finding]:
    """Say whether what Horovod was built against is what is installed now."""
    if horovod is None:
        return
    for name, framework in frameworks.items():
        if name not in horovod.libraries:
            yield Finding("fit", "warning", f"Horovod was not built for {name}", MEND)
            continue
        built = horovod.built_against.get(name)
        if built is not None and built != framework.version:
            yield Finding(
                "fit",
                "fault",
                f"Horovod was built against {name} {built}, and {framework.version} is installed",
                MEND,
            )
        elif built is not None:
            yield Finding("fit", "ok", f"built against the {name} that is installed")
    for name in horovod.libraries:
        if name not in frameworks:
            text = f"Horovod was built for {name}, which is not installed"
            yield Finding("fit", "warning", text, f"pip install {name}")


def _examine_probes(
    horovod: InstalledHorovod | None, probes: Mapping[str, Probe]
) -> Iterator[Finding]:
    if horovod is not None and not horovod.libraries:
        yield Finding("library", "fault", "Horovod has no native library", MEND)
    for name, probe in probes.items():
        if probe.error:
            text = f"the {name} library does not load: {probe.error}"
            yield Finding("library", "fault", text, MEND)
            continue
        features = probe.features
        controllers = [c for c in ("gloo", "mpi") if features.get(c)]
        operations = [o for o in ("gloo", "mpi", "nccl", "ddl", "ccl") if features.get(o)]
        yield Finding(
            "library",
            "ok" if controllers else "fault",
            f"{name}: controllers {', '.join(controllers) or 'none'}; "
            f"tensor operations {', '.join(operations) or 'none'}",
            "" if controllers else MEND,
        )
        if features.get("mpi") and shutil.which("mpirun") is None:
            text = "MPI is built in and mpirun is not on PATH; horovodrun --gloo works without it"
            yield Finding("mpi", "warning", text, "apt-get install openmpi-bin")


def _examine_launcher(horovod: InstalledHorovod | None) -> Iterator[Finding]:
    if horovod is None:
        return
    own = Path(sysconfig.get_path("scripts")) / "horovodrun"
    found = shutil.which("horovodrun")
    if not own.is_file():
        yield Finding("horovodrun", "fault", f"{own} is not there", MEND)
    elif found is None:
        yield Finding(
            "horovodrun",
            "warning",
            f"{own.parent} is not on PATH",
            f"export PATH={own.parent}:$PATH, or activate the environment",
        )
    elif not os.path.samefile(found, own):
        text = f"PATH finds {found}, which belongs to another environment"
        yield Finding("horovodrun", "warning", text, f"use {own}")
    else:
        yield Finding("horovodrun", "ok", found)
