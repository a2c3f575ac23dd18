"""``debian:bookworm-slim`` where no registry is reachable: Debian's packages, and how to get more.

Into the base image, and never into a Dockerfile, go this machine's certificates and the settings
of its package clients. An index of pip that is a folder is served on the loopback interface: the
engine's containers share it.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.image.engine import Engine

__all__ = ["BASE", "provide_base"]

BASE = "debian:bookworm-slim"
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PULL_S = 120.0
BOOTSTRAP_S = 600.0
# Options of pip that name places where it looks for packages.
PLACES = ("index-url", "extra-index-url", "find-links")


@contextlib.contextmanager
def provide_base(engine: Engine, folder: Path) -> Iterator[None]:
    """Give an engine the base image, by pulling it or else by making it, until the block ends.

    Args:
        engine: The engine.
        folder: An empty folder to make it in.
    """
    with _served_folders() as settings:
        if not settings and _pull(engine):
            yield
            return
        root = folder / "root"
        mirror, sources = _read_apt_sources()
        bootstrap = ("debootstrap", "--variant=minbase", "--include=ca-certificates")
        try:
            _run([*bootstrap, SUITE, str(root), mirror], BOOTSTRAP_S)
            _copy_settings(root, sources, settings)
            _import(engine, root)
        finally:
            # debootstrap leaves these mounted when it is interrupted.
            for place in ("proc", "sys", "dev/pts", "dev"):
                if (root / place).is_mount():
                    subprocess.run(["umount", "--lazy", str(root / place)], check=False)
            shutil.rmtree(root, ignore_errors=True)
        yield


def _pull(engine: Engine) -> bool:
    try:
        return engine.docker("pull", BASE, timeout_s=PULL_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _import(engine: Engine, root: Path) -> None:
    with subprocess.Popen(
        ["tar", "--one-file-system", "-C", str(root), "-c", "."], stdout=subprocess.PIPE
    ) as tar:
        subprocess.run(
            ["docker", "import", "-", BASE],
            env=engine.environment,
            stdin=tar.stdout,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=BOOTSTRAP_S,
        )
    assert tar.returncode == 0


def _read_apt_sources() -> tuple[str, str]:
    """Return Debian's mirror, and lines of sources.list, as this machine has them if it is one."""
    fields = "$(ORIGIN) $(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]
    lines = _run(command, 60.0).splitlines() if shutil.which("apt-get") else []
    targets = [words for line in lines if len(words := line.split()) == 4]
    wanted = [t[1:] for t in targets if t[0] == "Debian" and t[2].startswith(SUITE)]
    mirrors = [uri for uri, suite, _ in wanted if suite == SUITE]
    mirror = mirrors[0] if mirrors else MIRROR
    wanted = wanted or [[mirror, SUITE, "main"]]
    return mirror, "".join(f"deb {uri} {suite} {part}\n" for uri, suite, part in wanted)


def _copy_settings(root: Path, sources: str, settings: dict[str, str]) -> None:
    """Copy certificates, apt's configuration and pip's settings into the tree of the image."""
    (root / "etc/apt/sources.list").write_text(sources, encoding="utf-8")
    # A file of a name that sorts last, so that nothing of the image is overwritten.
    configuration = _run(["apt-config", "dump", "Acquire"], 60.0)
    (root / "etc/apt/apt.conf.d/99machine").write_text(configuration, encoding="utf-8")
    for certificate in Path("/usr/local/share/ca-certificates").glob("**/*.crt"):
        shutil.copy(certificate, root / "usr/local/share/ca-certificates" / certificate.name)
    _run(["chroot", str(root), "update-ca-certificates"], 120.0)
    settings = dict(settings)
    if constraint := settings.get("constraint"):
        text = "".join(Path(name).read_text(encoding="utf-8") for name in constraint.split())
        (root / "etc/pip-constraints.txt").write_text(text, encoding="utf-8")
        settings["constraint"] = "/etc/pip-constraints.txt"
    settings["cert"] = "/etc/ssl/certs/ca-certificates.crt"
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (root / "etc/pip.conf").write_text("".join(["[global]\n", *lines]), encoding="utf-8")
    for unwanted in ("var/lib/apt/lists", "var/cache/apt/archives"):
        shutil.rmtree(root / unwanted)
        (root / unwanted / "partial").mkdir(parents=True)


@contextlib.contextmanager
def _served_folders() -> Iterator[dict[str, str]]:
    """Give pip's settings, with folders of this machine served over HTTP until the block ends."""
    settings = _read_pip_settings()
    with contextlib.ExitStack() as stack:
        for name in PLACES:
            if name in settings:
                places = settings[name].split()
                served = [stack.enter_context(_served(place)) for place in places]
                settings[name] = " ".join(served)
        yield settings


def _read_pip_settings() -> dict[str, str]:
    """Return pip's options that say where packages come from; those that are set later win."""
    settings = {}
    for line in _run([sys.executable, "-m", "pip", "config", "list"], 60.0).splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in (*PLACES, "constraint", "trusted-host"):
            settings[option] = value.strip("'\"").replace("\\n", " ").strip()
    return settings


@contextlib.contextmanager
def _served(place: str) -> Iterator[str]:
    """Give a URL for a place where pip looks: itself, or of a server if it is a folder."""
    parts = urlsplit(place)
    if parts.scheme not in ("", "file"):
        yield place
        return
    path = Path(unquote(parts.path)).resolve()
    # Pages of an index link to files beside its own folder.
    base = path if parts.scheme == "" else path.parent
    handler = functools.partial(_QuietHandler, directory=str(base))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{path.relative_to(base)}/"
        finally:
            server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def _run(command: list[str], timeout_s: float) -> str:
    """Run a command; return what it printed, which is in the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        words = " ".join(command)
        raise AssertionError(f"{words} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout
