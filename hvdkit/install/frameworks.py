"""Which frameworks are installed and how they were built, read from files; nothing is imported."""

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["DISTRIBUTIONS", "Framework", "find_framework", "find_frameworks"]

# Distributions that provide each framework's module, the usual one first.
DISTRIBUTIONS = {
    "torch": ("torch", "torch-nightly"),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-rocm",
        "tensorflow-cpu-aws",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
}


@dataclass(frozen=True)
class Framework:
    """One installed framework.

    Attributes:
        name: "torch" or "tensorflow".
        version: The full version, with a local part such as "+cpu".
        path: The folder of its module.
        cuda: The CUDA version that it was built with, if any.
        rocm: The ROCm version that it was built with, if any ("unknown" if it does not say).
        cxx11_abi: Whether its C++ libraries use the C++11 ABI.
    """

    name: str
    version: str
    path: Path
    cuda: str | None = None
    rocm: str | None = None
    cxx11_abi: bool = True


def find_framework(name: str) -> Framework | None:
    """Return what is installed of one framework, or None."""
    for distribution in DISTRIBUTIONS[name]:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return None
        path = Path(spec.origin).parent
        return _read_torch(version, path) if name == "torch" else _read_tensorflow(version, path)
    return None


def find_frameworks() -> dict[str, Framework]:
    """Return every framework that Horovod can be built for and that is installed."""
    found = {name: find_framework(name) for name in DISTRIBUTIONS}
    return {name: framework for name, framework in found.items() if framework is not None}


def _read_torch(version: str, path: Path) -> Framework:
    text = _read(path / "version.py")
    config = _read(path / "share/cmake/Torch/TorchConfig.cmake")
    return Framework(
        "torch",
        _assigned(text, "__version__") or version,
        path,
        cuda=_assigned(text, "cuda"),
        rocm=_assigned(text, "hip"),
        cxx11_abi="_GLIBCXX_USE_CXX11_ABI=0" not in config,
    )


def _read_tensorflow(version: str, path: Path) -> Framework:
    text = _read(path / "python/platform/build_info.py")

    def entry(key: str) -> str | None:
        match = re.search(rf"'{key}',\s*'?([^')]*)'?\)", text)
        return match[1] if match else None

    cuda = entry("cuda_version") if entry("is_cuda_build") == "True" else None
    rocm = entry("rocm_version") or "unknown" if entry("is_rocm_build") == "True" else None
    return Framework("tensorflow", version, path, cuda=cuda, rocm=rocm)


def _assigned(text: str, name: str) -> str | None:
    """Return the string that a line such as ``cuda: Optional[str] = '13.0'`` assigns."""
    match = re.search(rf"^{name}\b[^=\n]*=\s*'([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
