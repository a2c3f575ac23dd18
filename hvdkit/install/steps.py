"""The steps of `hvdkit install`, in order: plan, obtain the wheel, install it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from hvdkit.errors import BuildError
from hvdkit.install.build import build_wheel, prepare_source
from hvdkit.install.build_log import Progress
from hvdkit.install.cache import WheelCache
from hvdkit.install.frameworks import find_frameworks
from hvdkit.install.installed import find_horovod
from hvdkit.install.machine import free_disk_bytes, look_at_machine
from hvdkit.install.plan import Options, Plan, make_plan
from hvdkit.install.sdist import SDIST_NAME, fetch_sdist, unpack, verify
from hvdkit.install.toolchain import look_at_toolchain
from hvdkit.install.tools import (
    find_missing_packages,
    find_missing_runtime,
    install_packages,
    join_python_path,
    run_pip,
)

__all__ = [
    "Listener",
    "copy_wheel",
    "draw_plan",
    "install_wheel",
    "is_installed",
    "obtain_wheel",
    "require_buildable",
    "require_writable",
]


class Listener(Protocol):
    """Who is told how the work goes."""

    def step(self, text: str) -> None:
        """A step of the work begins."""

    def progress(self, progress: Progress) -> None:
        """The compilation came further."""


def draw_plan(options: Options, root: Path) -> Plan:
    """Look at this environment and machine, and make the plan.

    Args:
        options: What the user asked for.
        root: The folder of the cache.

    Raises:
        BuildError: As :func:`hvdkit.install.plan.make_plan`.
    """
    free = min(free_disk_bytes(_workspace_parent(root)), free_disk_bytes(root))
    return make_plan(options, find_frameworks(), look_at_machine(), look_at_toolchain(), free)


def require_buildable(plan: Plan) -> None:
    """Check that nothing the build needs is missing.

    Raises:
        BuildError: Something is; one line says what, and what installs it.
    """
    if not plan.missing:
        return
    what = "; ".join(text for text, _ in plan.missing)
    packages = " ".join(package for _, package in plan.missing if package)
    remedy = f" Install it, for example: apt-get install {packages}" if packages else ""
    raise BuildError(f"Horovod cannot be built here without {what}.{remedy}")


def obtain_wheel(
    plan: Plan, root: Path, listener: Listener, sdist: Path | None = None, force: bool = False
) -> tuple[Path, bool]:
    """Return the plan's wheel from the cache, building it first if it is not there.

    Args:
        plan: The plan.
        root: The folder of the cache.
        listener: Who is told how it goes.
        sdist: Horovod's source distribution; by default it is got through pip.
        force: Build even if the cache has the wheel.

    Returns:
        The wheel, and whether it was built by this call.

    Raises:
        BuildError: It could not be built; says why and where the log is.
    """
    if sdist is not None:
        verify(sdist)
    cache = WheelCache(root)
    if not force and (wheel := cache.find(plan.key)):
        return wheel, False
    require_buildable(plan)
    try:
        with cache.lock(plan.key, lambda: listener.step("Waiting for another hvdkit install")):
            # Whoever held the lock may have built it.
            if not force and (wheel := cache.find(plan.key)):
                return wheel, False
            return _build(plan, root, cache, listener, sdist), True
    except OSError as error:
        raise BuildError(
            f"{error.strerror}: {error.filename or root}. Set HVDKIT_CACHE_DIR to a folder that "
            "you may write to, on a disk with room."
        ) from error


def require_writable(folder: Path) -> None:
    """Make the folder that is to get the wheel, before minutes of work are done for it.

    Raises:
        BuildError: It cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _refuse_wheel_dir(folder, error) from error


def copy_wheel(wheel: Path, folder: Path) -> Path:
    """Copy a wheel into a folder for other nodes, whole or not at all; return the copy.

    Raises:
        BuildError: The file system refuses.
    """
    copy, part = folder / wheel.name, folder / f".{wheel.name}.{os.getpid()}"
    try:
        shutil.copy2(wheel, part)
        part.replace(copy)
    except OSError as error:
        raise _refuse_wheel_dir(folder, error) from error
    finally:
        part.unlink(missing_ok=True)
    return copy


def is_installed(plan: Plan) -> bool:
    """Tell whether this environment holds, undamaged, the Horovod that the plan would build."""
    horovod = find_horovod()
    return (
        horovod is not None
        and horovod.record.get("key") == plan.key
        and not horovod.lost
        and {f.name for f in plan.frameworks} <= set(horovod.libraries)
        and not find_missing_runtime()
    )


def install_wheel(wheel: Path) -> None:
    """Install a wheel over whatever Horovod is there, and what Horovod imports at run time.

    Raises:
        BuildError: pip failed.
    """
    if missing := find_missing_runtime():
        run_pip(["install", "--quiet", *missing], f"install {', '.join(missing)} for Horovod")
    run_pip(
        ["install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        f"install {wheel.name}",
    )


def _refuse_wheel_dir(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"Cannot write to {folder}: {error.strerror}. Give another folder with --wheel-dir."
    )


def _build(
    plan: Plan, root: Path, cache: WheelCache, listener: Listener, sdist: Path | None
) -> Path:
    tools = root / "tools" / f"{plan.material['python']}"
    if missing := find_missing_packages(plan.toolchain):
        listener.step(f"Getting build tools: {', '.join(missing)}")
        install_packages(missing, tools)
    listener.step("Checking Horovod's source" if sdist else "Getting Horovod's source through pip")
    archive = sdist or fetch_sdist(root / "sdist", join_python_path(tools))
    with _workspace(root) as workspace:
        source = unpack(archive, workspace)
        listener.step(f"Making {len(plan.edits)} compatibility edits")
        prepare_source(source, plan)
        listener.step(f"Compiling with {plan.jobs} job{'s' if plan.jobs > 1 else ''}")
        log = root / "logs" / f"{SDIST_NAME.removesuffix('.tar.gz')}-{plan.key}.log"
        wheel = build_wheel(plan, source, workspace, log, tools, listener.progress)
        return cache.store(plan.key, wheel, plan.material)


def _workspace_parent(root: Path) -> Path:
    # TMPDIR if the user chose one; otherwise the cache's disk, since /tmp is often in memory.
    return Path(os.environ["TMPDIR"]) if os.environ.get("TMPDIR") else root / "builds"


@contextlib.contextmanager
def _workspace(root: Path) -> Iterator[Path]:
    parent = _workspace_parent(root)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="horovod-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
