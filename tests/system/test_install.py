"""`hvdkit install` against the real source distribution; nothing here compiles Horovod whole."""

import base64
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from hvdkit.errors import BuildError
from hvdkit.install.build import prepare_source
from hvdkit.install.cache import WheelCache, cache_root
from hvdkit.install.compatibility import EDITS
from hvdkit.install.edits import Target, apply_edits, select_edits
from hvdkit.install.frameworks import find_frameworks
from hvdkit.install.installed import find_horovod
from hvdkit.install.plan import Options
from hvdkit.install.sdist import SDIST_SHA256, fetch_sdist, unpack
from hvdkit.install.steps import copy_wheel, draw_plan
from tests.system.command import ROOT, find_processes_naming, make_environment, run_hvdkit

COMBINATIONS = [
    {"torch": "2.13.0"},
    *({"tensorflow": f"2.{minor}.0"} for minor in (16, 18, 19, 20, 21)),
    {"torch": "2.13.0", "tensorflow": "2.21.0"},
]


@pytest.fixture(scope="session")
def sdist():
    """Give Horovod's source distribution, got through pip as `hvdkit install` gets it."""
    archive = fetch_sdist(cache_root() / "sdist")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == SDIST_SHA256
    return archive


@pytest.fixture(scope="session")
def pristine(sdist, tmp_path_factory):
    """Give the unpacked, unmodified source."""
    return unpack(sdist, tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def edited(pristine, tmp_path):
    """Give a function that returns the source with the edits for some versions made."""

    def edit(versions):
        root = tmp_path / "source"
        edits = select_edits(EDITS, Target(versions))
        for path in {edit.path for edit in edits}:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(pristine / path, root / path)
        apply_edits(root, edits)
        return root

    return edit


def name_versions(versions):
    return "-".join(f"{name}{version}" for name, version in versions.items())


@pytest.mark.parametrize("versions", COMBINATIONS, ids=name_versions)
def test_every_edit_fits_the_real_source(edited, pristine, versions):
    root = edited(versions)
    for path in {edit.path for edit in select_edits(EDITS, Target(versions))}:
        assert (root / path).read_text() != (pristine / path).read_text()


def test_every_edit_is_used_by_some_combination():
    used = {e.name for v in COMBINATIONS for e in select_edits(EDITS, Target(v))}
    assert used == {edit.name for edit in EDITS}


def list_include_options(root, pristine, *own):
    """Return -I options: the edited files, then the source, with some of its own libraries."""
    third_party = ["HTTPRequest/include", "lbfgs/include", "gloo", *own]
    boost = sorted((pristine / "third_party/boost").glob("*/include"))
    folders = [root / "third_party/gloo", root]
    folders += [pristine / "third_party" / name for name in third_party] + boost
    return [f"-I{folder}" for folder in folders]


def compile_only(compiler, source, *options):
    """Let a compiler read a file; return what it complains of."""
    done = subprocess.run(
        [compiler, "-std=c++17", "-w", *options, str(source)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.parametrize(
    "path",
    [
        "horovod/common/common.cc",
        "horovod/common/group_table.cc",
        "horovod/common/ops/gloo_operations.cc",
        "horovod/common/gloo/gloo_controller.cc",
        "horovod/torch/handle_manager.cc",
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "third_party/gloo/gloo/types.cc",
    ],
)
def test_edited_sources_compile(pristine, tmp_path, path):
    root = tmp_path / "source"
    for folder in ("horovod/common", "horovod/torch", "third_party/gloo/gloo"):
        shutil.copytree(pristine / folder, root / folder)
    edits = select_edits(EDITS, Target({"torch": "2.13.0"}))
    apply_edits(root, [edit for edit in edits if (root / edit.path).is_file()])
    options = ["-DHAVE_GLOO=1", "-DEIGEN_MPL2_ONLY=1", "-fsyntax-only"]
    include = list_include_options(root, pristine, "eigen", "flatbuffers/include")
    assert compile_only("c++", root / path, *options, *include) == ""


@pytest.fixture(scope="session")
def nvcc():
    """Give the CUDA compiler, where there is one."""
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        if "cuda" in os.environ.get("HVDKIT_REQUIRE", "").split(","):
            pytest.fail("HVDKIT_REQUIRE demands the CUDA tests, but there is no nvcc")
        pytest.skip("no nvcc; the CUDA edits are tested as text only")
    return found


def test_cuda_kernels_compile_in_the_standard_of_the_edit(edited, pristine, nvcc, tmp_path):
    root = edited({"torch": "2.13.0"})
    text = (root / "horovod/common/ops/cuda/CMakeLists.txt").read_text()
    assert "set(CMAKE_CUDA_STANDARD 17)" in text
    kernels = pristine / "horovod/common/ops/cuda/cuda_kernels.cu"
    defines = ["-DHAVE_CUDA=1", "-DHAVE_GPU=1", "-arch=sm_90", "-c", "-o", str(tmp_path / "k.o")]
    assert compile_only(nvcc, kernels, *defines, "-Xcompiler", "-fPIC") == ""


def test_tensorflow_operations_compile_for_cuda(pristine, nvcc, tmp_path):
    """The stream of the public handle, against the headers of the TensorFlow that is here."""
    tensorflow = find_frameworks().get("tensorflow")
    if tensorflow is None:
        pytest.skip("no TensorFlow; its CUDA edit is tested as text only")
    root = tmp_path / "source"
    for folder in ("horovod/common", "horovod/tensorflow"):
        shutil.copytree(pristine / folder, root / folder)
    edits = select_edits(EDITS, Target({"tensorflow": tensorflow.version}))
    apply_edits(root, [edit for edit in edits if (root / edit.path).is_file()])
    headers = tensorflow.path / "include"
    cuda = Path(os.path.realpath(nvcc)).parents[1] / "include"
    if not (cuda / "cuda_runtime.h").is_file():
        cuda = Path("/usr/local/cuda/include")
    options = [
        "-fsyntax-only",
        "-DHAVE_GLOO=1",
        "-DHAVE_CUDA=1",
        "-DHAVE_GPU=1",
        "-DTENSORFLOW_VERSION=2021000000",
        *list_include_options(root, pristine),
        f"-isystem{headers}",
        f"-isystem{headers}/external/highwayhash",
        f"-isystem{headers}/external/farmhash_archive/src",
        f"-isystem{cuda}",
    ]
    assert compile_only("c++", root / "horovod/tensorflow/mpi_ops.cc", *options) == ""


def test_the_record_is_in_the_edited_source(sdist, tmp_path):
    source = unpack(sdist, tmp_path)
    plan = draw_plan(Options(), tmp_path)
    prepare_source(source, plan)
    assert plan.key in (source / "horovod/hvdkit_build.json").read_text()
    assert "hvdkit_build.json" in (source / "setup.py").read_text()


def test_dry_run_shows_the_plan_and_does_nothing(tmp_path):
    done = run_hvdkit("install", "--dry-run", "--jobs", "3", HVDKIT_CACHE_DIR=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    for framework in find_frameworks().values():
        assert f"{framework.name} " in done.stdout
        assert framework.version in done.stdout
    assert "gloo-stall-ranks" in done.stdout
    assert "to be built, key " in done.stdout
    assert not (tmp_path / "cache").exists()
    broken = tmp_path / "horovod-0.28.1.tar.gz"
    broken.write_bytes(b"no archive")
    done = run_hvdkit(
        "install", "--dry-run", "--sdist", broken, HVDKIT_CACHE_DIR=tmp_path / "cache"
    )
    assert done.returncode == 1
    assert f"expected {SDIST_SHA256}" in done.stderr


@pytest.mark.parametrize("command", [("doctor",), ("install", "--dry-run")])
def test_a_narrow_terminal_without_unicode_cuts_nothing_off(command, tmp_path):
    """Nor does a table fail for want of a character that would say so."""
    root = tmp_path / ("cache" * 20)
    plan = draw_plan(Options(), root)
    stored = WheelCache(root).store(plan.key, make_wheel(tmp_path), plan.material)
    done = run_hvdkit(*command, HVDKIT_CACHE_DIR=root, COLUMNS="60", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    words = "".join(line.strip("|").rsplit("|")[-1].strip() for line in done.stdout.splitlines())
    if command[0] == "install":
        assert str(stored) in words


def make_wheel(folder):
    """Make a file that the cache takes for a wheel."""
    wheel = folder / "horovod-0.28.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/__init__.py", "")
    return wheel


def test_a_folder_that_cannot_get_the_wheel_is_said_before_the_build(tmp_path):
    root = tmp_path / "cache"
    for folder in ("/proc/wheels", "/dev/null/wheels"):
        done = run_hvdkit("install", "--wheel-dir", folder, HVDKIT_CACHE_DIR=root)
        assert done.returncode == 1
        (line,) = done.stderr.strip().splitlines()
        assert f"Cannot write to {folder}: " in line
        assert line.endswith("Give another folder with --wheel-dir.")
    assert not root.exists()


def test_a_wheel_is_copied_whole_or_not_at_all(tmp_path):
    wheel = make_wheel(tmp_path)
    folder = tmp_path / "wheels"
    folder.mkdir()
    assert copy_wheel(wheel, folder).read_bytes() == wheel.read_bytes()
    (folder / wheel.name).unlink()
    (folder / wheel.name).mkdir()  # no file can take its place
    with pytest.raises(BuildError, match=f"Cannot write to {folder}: .*--wheel-dir"):
        copy_wheel(wheel, folder)
    assert [path.name for path in folder.iterdir()] == [wheel.name]


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_hvdkit("install", "--force", HVDKIT_CACHE_DIR=tmp_path / "file")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith(
        "Set HVDKIT_CACHE_DIR to a folder that you may write to, on a disk with room."
    )


def test_what_make_test_installed_is_what_the_plan_says():
    """The Horovod of this environment was built by hvdkit for the frameworks that are here."""
    horovod = find_horovod()
    assert horovod is not None
    versions = {name: framework.version for name, framework in find_frameworks().items()}
    assert horovod.record["frameworks"] == versions
    assert horovod.lost == ()
    again = run_hvdkit("install")
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout


def repack_installed(folder):
    """Make the wheel of the installed Horovod again, from its files."""
    distribution = metadata.distribution("horovod")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    name = f"horovod-0.28.1-{tag}-{tag}-{platform}.whl"
    rows = []
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in distribution.files:
            left_out = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
            if ".." in file.parts or "__pycache__" in file.parts or file.name in left_out:
                continue
            content = Path(distribution.locate_file(file)).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            rows.append([str(file), f"sha256={digest.decode()}", len(content)])
            archive.writestr(str(file), content)
        with archive.open("horovod-0.28.1.dist-info/RECORD", "w") as record:
            text = "".join(f"{name},{digest},{size}\n" for name, digest, size in rows)
            record.write(text.encode() + b"horovod-0.28.1.dist-info/RECORD,,\n")
    return folder / name


def test_a_cached_wheel_needs_no_compiler_and_goes_to_other_nodes(tmp_path):
    """A second machine with the cache but without tools; then the same with a damaged wheel."""
    root = tmp_path / "cache"
    plan = draw_plan(Options(), root)
    stored = WheelCache(root).store(plan.key, repack_installed(tmp_path), plan.material)
    out = tmp_path / "wheels"
    arguments = ("install", "--wheel-dir", out)
    no_tools = {"HVDKIT_CACHE_DIR": root, "PATH": tmp_path}
    if plan.mpi or plan.gpu:  # without their tools the plan would be another
        no_tools["PATH"] = os.environ["PATH"]
    done = run_hvdkit(*arguments, **no_tools)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == [stored.name]
    target = tmp_path / "node"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--target", str(target), str(out / stored.name)],
        check=True,
        capture_output=True,
    )
    assert (target / "horovod/hvdkit_build.json").is_file()
    stored.write_bytes(stored.read_bytes()[:-100])
    again = run_hvdkit(*arguments, **{**no_tools, "PATH": tmp_path})
    assert again.returncode == 1
    assert "cannot be built here without a C++ compiler" in again.stderr


def test_no_compiler_is_one_line_that_says_what_to_install(tmp_path):
    cache = tmp_path / "cache"
    for arguments in (("install",), ("install", "--dry-run")):
        done = run_hvdkit(*arguments, "--force", PATH=tmp_path, HVDKIT_CACHE_DIR=cache)
        assert done.returncode == 1
        (line,) = done.stderr.strip().splitlines()
        assert line.endswith("apt-get install g++ make")


def test_a_cxx_that_is_not_there_is_named(tmp_path):
    done = run_hvdkit("install", "--force", CXX="nonesuch-g++", HVDKIT_CACHE_DIR=tmp_path)
    assert done.returncode == 1
    assert "the C++ compiler that CXX names (nonesuch-g++)" in done.stderr


def test_a_broken_sdist_is_refused_before_anything_is_built(sdist, tmp_path):
    broken = tmp_path / "horovod-0.28.1.tar.gz"
    broken.write_bytes(sdist.read_bytes()[:-1])
    cache = tmp_path / "cache"
    done = run_hvdkit("install", "--force", "--sdist", broken, HVDKIT_CACHE_DIR=cache)
    assert done.returncode == 1
    assert f"expected {SDIST_SHA256}" in done.stderr
    assert not (cache / "wheels").exists()


def test_a_missing_sdist_is_a_usage_error(tmp_path):
    done = run_hvdkit("install", "--sdist", tmp_path / "none.tar.gz")
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_an_index_that_cannot_be_reached_suggests_the_file(tmp_path):
    empty = tmp_path / "index"
    empty.mkdir()
    done = run_hvdkit(
        "install",
        "--force",
        HVDKIT_CACHE_DIR=tmp_path / "cache",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=empty,
    )
    assert done.returncode == 1
    assert "--sdist horovod-0.28.1.tar.gz" in done.stderr


def test_a_full_disk_is_said_before_the_build(sdist, tmp_path):
    """A real file system of 8 MiB, mounted where only this process sees it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    command = (
        f"mount -t tmpfs -o size=8m none {small} && HVDKIT_CACHE_DIR={small} TMPDIR= "
        f"exec {sys.executable} -m hvdkit.cli install --force --sdist {sdist}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=ROOT,
        env=make_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "disk space: 0.0 GiB are free, 1.5 are needed" in done.stderr


def write_compiler(path, body):
    """Write a compiler that does something of its own before it would be g++."""
    path.write_text(f'#!/bin/sh\n{body}\nexec g++ "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def torch_is_here():
    """Demand PyTorch, for which the failing builds below are configured."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch to build for")


def test_a_failed_build_shows_the_first_error_a_hint_and_the_log(sdist, tmp_path, torch_is_here):
    compiler = write_compiler(
        tmp_path / "g++",
        'case "$*" in *-c*gloo*) echo "gloo/x.h:7:3: fatal error: Python.h: No such file" >&2; '
        "exit 1;; esac",
    )
    cache = tmp_path / "cache"
    done = run_hvdkit(
        *("install", "--force", "--frameworks", "torch", "--sdist", sdist),
        CXX=compiler,
        HVDKIT_CACHE_DIR=cache,
        TMPDIR=None,
    )
    assert done.returncode == 1
    error, hint, where = done.stderr.strip().splitlines()
    assert error.endswith("did not build: gloo/x.h:7:3: fatal error: Python.h: No such file")
    assert "python3-dev" in hint
    log = Path(where.removeprefix("Log: "))
    assert log.parent == cache / "logs"
    assert "HOROVOD_WITH_PYTORCH=1" in log.read_text()
    assert "fatal error: Python.h" in log.read_text()
    assert list((cache / "builds").iterdir()) == []
    assert not [path for path in (cache / "wheels").iterdir() if path.is_dir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_ends_the_whole_build(sdist, tmp_path, torch_is_here, number):
    compiler = write_compiler(
        tmp_path / "g++", f'case "$*" in *-c*) touch {tmp_path}/started; sleep 600;; esac'
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "hvdkit.cli", "install", "--force"]
    process = subprocess.Popen(
        [*command, "--frameworks", "torch", "--sdist", str(sdist)],
        cwd=ROOT,
        env=make_environment(CXX=compiler, HVDKIT_CACHE_DIR=cache, TMPDIR=None),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "started").exists():
            assert process.poll() is None, "the build ended before its compiler started"
            assert time.monotonic() < deadline, "the compiler never started"
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
    assert find_processes_naming(str(tmp_path)) == []
    assert list((cache / "builds").iterdir()) == []
