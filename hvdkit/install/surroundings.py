"""What surrounds a Horovod: GPUs, network interfaces, ssh, shared memory, threads."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from hvdkit.install.findings import Finding
from hvdkit.install.frameworks import Framework
from hvdkit.install.hosts.probe import list_addresses
from hvdkit.install.machine import look_at_machine
from hvdkit.install.probe import Probe

__all__ = ["examine_surroundings"]

MIB = 1 << 20
# Docker gives 64 MiB; workers of a DataLoader and Open MPI fail with less than a few batches.
MIN_SHM_BYTES = 128 * MIB


def examine_surroundings(
    frameworks: Mapping[str, Framework], probes: Mapping[str, Probe]
) -> Iterator[Finding]:
    """Examine the machine as far as distributed training depends on it."""
    yield from _examine_gpus(frameworks, probes)
    yield from _examine_network()
    yield from _examine_ssh()
    yield from _examine_shared_memory()
    yield from _examine_threads()


def _examine_gpus(
    frameworks: Mapping[str, Framework], probes: Mapping[str, Probe]
) -> Iterator[Finding]:
    gpus = _ask("nvidia-smi", "-L") or _ask("rocm-smi", "--showproductname")
    if not gpus:
        yield Finding("gpu", "ok", "none found by nvidia-smi or rocm-smi")
        return
    yield Finding("gpu", "ok", f"{len(gpus)}: {gpus[0]}")
    for name, framework in frameworks.items():
        if not framework.cuda and not framework.rocm:
            text = f"{name} {framework.version} is a CPU build and leaves them idle"
            yield Finding("gpu", "warning", text, f"install a GPU build of {name}")
        elif name in probes and not probes[name].features.get("nccl"):
            text = f"Horovod moves {name} tensors through the CPU: it was built without NCCL"
            yield Finding("gpu", "warning", text, "hvdkit install --gpu nccl")


def _ask(*command: str) -> list[str]:
    """Return the lines that a program prints; none when it is absent, fails or hangs."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in done.stdout.splitlines() if "GPU" in line]
    return lines if done.returncode == 0 else []


def _examine_network() -> Iterator[Finding]:
    addresses = list_addresses()
    text = ", ".join(f"{name} {address}" for name, address in addresses.items())
    if any(not address.startswith("127.") for address in addresses.values()):
        yield Finding("network", "ok", text)
    else:
        found = text or "no interface has an IPv4 address"
        yield Finding("network", "ok", f"{found}: enough for this host, not for several")


def _examine_ssh() -> Iterator[Finding]:
    if ssh := shutil.which("ssh"):
        yield Finding("ssh", "ok", ssh)
    else:
        text = "no ssh client: horovodrun starts workers on other hosts through it"
        yield Finding("ssh", "warning", text, "apt-get install openssh-client")


def _examine_shared_memory() -> Iterator[Finding]:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        yield Finding("shared memory", "warning", "/dev/shm is not there", "mount a tmpfs on it")
        return
    text = f"/dev/shm has {size / MIB:.0f} MiB"
    if size < MIN_SHM_BYTES:
        remedy = "docker run --shm-size=1g"
        yield Finding("shared memory", "warning", f"{text}: data loaders may crash", remedy)
    else:
        yield Finding("shared memory", "ok", text)


def _examine_threads() -> Iterator[Finding]:
    cores = look_at_machine().cores
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if not chosen:
        text = f"OMP_NUM_THREADS is not set; {cores} cores to share among the workers of this host"
        yield Finding("threads", "ok", text)
    elif not chosen.split(",")[0].isdigit() or int(chosen.split(",")[0]) < 1:
        text = f"OMP_NUM_THREADS={chosen} is not a positive number"
        yield Finding("threads", "warning", text, "export OMP_NUM_THREADS=1")
    elif int(chosen.split(",")[0]) > cores:
        text = f"OMP_NUM_THREADS={chosen} is more than the {cores} cores"
        yield Finding("threads", "warning", text, "use cores divided by workers per host")
    else:
        yield Finding("threads", "ok", f"OMP_NUM_THREADS={chosen}, {cores} cores")
