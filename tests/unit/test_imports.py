"""Imports go one way, and the package and its help load no framework."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hvdkit

ROOT = Path(hvdkit.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod"}
PURE = {
    "errors",
    "event_sinks",
    "events",
    "elastic",
    "env",
    "epoch_position",
    "buckets",
    "schedule",
    "sharding",
    "checkpoint",
    "random_state",
    "background",
    "directory_lock",
    "manifest",
    "detectors",
    "health",
    "settings",
    "tuning",
    "trace",
    "agreement",
    "hyper_parameters",
    "metrics",
    "replica_check",
    "replicas",
    "rollback",
}
ADAPTERS = {"torch", "tensorflow", "keras"}
# Part -> the parts of hvdkit that it may import, beside itself and hvdkit's version.
ALLOWED = {
    **{module: PURE for module in PURE},
    **{adapter: PURE for adapter in ADAPTERS},
    "results": PURE,
    "launch": PURE,
    "bench": PURE | {"results", "launch"},
    "install": PURE | {"results"},
    "profile": PURE | {"results"},
    "cli": PURE | {"results", "bench", "install", "profile", "launch"},
}
# Keras lives in its own adapter; TensorFlow users reach it by the name that Horovod has for it.
EXCEPTIONS = {("hvdkit.tensorflow.keras", "keras")}


def list_modules():
    """Return (dotted name, path) of every module of the package."""
    modules = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        modules.append((".".join(p for p in parts if p != "__init__"), path))
    return modules


def find_imports(name, path):
    """Return the absolute names that a module imports, wherever the statement stands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            # "from hvdkit import errors" imports hvdkit.errors.
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def find_part(imported):
    """Return the part of hvdkit that an imported name belongs to; None for others."""
    names = imported.split(".")
    if names[0] != "hvdkit" or len(names) == 1 or names[1].startswith("__"):
        return None
    return names[1]


MODULES = list_modules()


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_go_one_way(name, path):
    part = find_part(name)
    if part is None:
        assert not [i for i in find_imports(name, path) if find_part(i)], "the root imports a part"
        return
    assert part in ALLOWED, f"{part} is not in the design; add it to ALLOWED with what it may use"
    wrong = {
        imported
        for imported in find_imports(name, path)
        if (other := find_part(imported)) not in (None, part)
        and other not in ALLOWED[part]
        and (name, other) not in EXCEPTIONS
    }
    assert not wrong


def list_exports(path):
    """Return the literal ``__all__`` of a module; None where it is computed or absent."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                return None
    return None


def test_what_a_module_takes_from_another_is_in_all_of_it():
    exports = {name: list_exports(path) for name, path in MODULES}
    for name, path in MODULES:
        for imported in find_imports(name, path):
            source, _, taken = imported.rpartition(".")
            if imported in exports or exports.get(source) is None or taken in ("*", "__all__"):
                continue
            assert taken in exports[source], f"{name} takes {taken} from {source}"


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_frameworks_are_imported_where_they_belong(name, path):
    part = find_part(name)
    found = {i.split(".")[0] for i in find_imports(name, path)} & FRAMEWORKS
    if part in ADAPTERS:
        # Each adapter knows its own framework; the Keras one has a PyTorch backend.
        own = FRAMEWORKS if part == "keras" else {part, "keras", "horovod"}
        assert found <= own - ({"keras"} if part == "torch" else set())
    elif part != "bench":  # a benchmark trains models; its files import frameworks when run
        assert not found


def test_the_finder_sees_every_kind_of_import(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import hvdkit.cli\nfrom hvdkit import bench\nfrom . import cache\n"
        "from ..errors import X\ndef f():\n    import torch.nn\n"
    )
    assert find_imports("hvdkit.install.module", path) == [
        "hvdkit.cli",
        "hvdkit.bench",
        "hvdkit.install.cache",
        "hvdkit.errors.X",
        "torch.nn",
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import hvdkit",
        "import hvdkit.env, hvdkit.errors",
        "from hvdkit.cli import main; main(['--help'], standalone_mode=False)",
        *(
            f"from hvdkit.cli import main; main(['{command}', '--help'], standalone_mode=False)"
            for command in ("install", "doctor", "check", "bench")
        ),
    ],
)
def test_no_framework_is_loaded(code):
    """In a fresh interpreter, with the modules that it ended with as the witness."""
    script = f"{code}\nimport sys; print('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.split("MODULES")[-1].split()
    assert "hvdkit" in loaded
    assert not FRAMEWORKS & set(loaded)


def test_the_help_loads_neither_rich_nor_a_subcommand():
    script = (
        "from hvdkit.cli import main; main(['--help'], standalone_mode=False)\n"
        "import sys; print('MODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split("MODULES")[-1].split())
    assert not {"rich", "jsonschema", "jinja2", "matplotlib"} & loaded
    assert not [
        m
        for m in loaded
        if m.startswith(("hvdkit.cli.", "hvdkit.install")) and m != "hvdkit.cli.lazy"
    ]
