"""Building the image as its page says, from a copy of the source tree with things to leave out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from hvdkit.install.cache import WheelCache, cache_root
from hvdkit.install.plan import Options
from hvdkit.install.steps import draw_plan
from tests.image.engine import Engine
from tests.system.documents import take_block

__all__ = ["DECOY", "ROOT", "build", "make_context", "share_wheel"]

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 1800.0
# What lies about in a checkout and belongs in no image; all of it says this.
DECOY = "hvdkit-test-secret-5f1d"
DECOYS = (
    ".env",
    ".git/config",
    ".ssh/id_ed25519",
    ".venv/pyvenv.cfg",
    "build/result.json",
    "examples/__pycache__/module.pyc",
    "examples/torch/checkpoints/step-1/model.bin",
    "hvdkit/__pycache__/module.pyc",
    "id_rsa",
)


def make_context(folder: Path) -> Path:
    """Copy the files of the source tree, and plant what .dockerignore has to leave out."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():  # a file that is deleted and not yet committed is listed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for name in DECOYS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(DECOY, encoding="utf-8")
    return folder


def share_wheel(context: Path, home: Path) -> bool:
    """Copy the wheel that the image needs from this machine's cache, if it has it; say so.

    This environment's plan is the image's where Python, frameworks, MPI and C library are.

    Args:
        context: The source tree to build from.
        home: An empty folder, where a user who has just that wheel is at home.
    """
    plan = draw_plan(Options(), cache_root())
    wheel = WheelCache(cache_root()).find(plan.key)
    if plan.mpi is None or wheel is None:
        return False
    shutil.copytree(wheel.parent, home / ".cache/hvdkit/wheels" / plan.key)
    (command,) = take_block("docker/cache/README.md", "cp -r ~/.cache/hvdkit/wheels").commands
    environment = {**os.environ, "HOME": str(home)}
    subprocess.run(["sh", "-c", command], cwd=context, env=environment, check=True, timeout=60)
    return True


def build(
    engine: Engine, context: Path, command: str, arguments: Mapping[str, str]
) -> tuple[str, float]:
    """Build an image by a command of a page, with more arguments.

    Returns:
        What the build printed, and the seconds that it took.
    """
    words = command.split()
    assert words[:2] == ["docker", "build"]
    proxies = [name for name in os.environ if re.fullmatch("(?i)(https?|no|all)_proxy", name)]
    # A variable without a value has the environment's.
    given = [*(f"{name}={value}" for name, value in arguments.items()), *proxies]
    words[2:2] = ["--network=host", *(f"--build-arg={argument}" for argument in given)]
    start_s = time.monotonic()
    done = engine.call(words, BUILD_S, folder=context)
    return done.stdout, time.monotonic() - start_s
