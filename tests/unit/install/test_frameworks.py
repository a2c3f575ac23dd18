"""What is read of an installed framework, from files laid out as the wheels lay them out."""

import pytest

from hvdkit.install.frameworks import find_framework, find_frameworks

TORCH_VERSION = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'abc'
hip: Optional[str] = {hip}
"""
BUILD_INFO = """\
import collections

build_info = collections.OrderedDict([('cpu_compiler', 'clang'), {entries}])
"""


def add_distribution(site, name, version):
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def add_torch(site, version="2.13.0+cpu", cuda="None", hip="None"):
    add_distribution(site, "torch", version.split("+")[0])
    (site / "torch").mkdir()
    # Importing it would fail: nothing may.
    (site / "torch/__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch/version.py").write_text(
        TORCH_VERSION.format(version=version, cuda=cuda, hip=hip)
    )


def add_tensorflow(site, entries, name="tensorflow", version="2.21.0"):
    add_distribution(site, name, version)
    folder = site / "tensorflow/python/platform"
    folder.mkdir(parents=True)
    (site / "tensorflow/__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "build_info.py").write_text(BUILD_INFO.format(entries=entries))


def test_nothing_is_installed(site):
    assert find_frameworks() == {}


def test_torch_for_cpu(site):
    add_torch(site)
    torch = find_framework("torch")
    assert (torch.version, torch.cuda, torch.rocm) == ("2.13.0+cpu", None, None)
    assert torch.path == site / "torch"
    assert torch.cxx11_abi


def test_torch_for_cuda_and_rocm(site):
    add_torch(site, "2.13.0+cu130", cuda="'13.0'", hip="'7.1.2'")
    torch = find_framework("torch")
    assert (torch.version, torch.cuda, torch.rocm) == ("2.13.0+cu130", "13.0", "7.1.2")


def test_torch_with_the_old_abi(site):
    add_torch(site, "2.5.1")
    folder = site / "torch/share/cmake/Torch"
    folder.mkdir(parents=True)
    (folder / "TorchConfig.cmake").write_text('set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n')
    assert not find_framework("torch").cxx11_abi


@pytest.mark.parametrize(
    ("entries", "cuda", "rocm"),
    [
        ("('cuda_version', '12.5.1'), ('is_cuda_build', True)", "12.5.1", None),
        ("('is_cuda_build', False), ('is_rocm_build', False)", None, None),
        ("('is_cuda_build', False), ('is_rocm_build', True), ('rocm_version', '7.0')", None, "7.0"),
        ("('is_cuda_build', False), ('is_rocm_build', True)", None, "unknown"),
    ],
)
def test_tensorflow(site, entries, cuda, rocm):
    add_tensorflow(site, entries)
    tensorflow = find_framework("tensorflow")
    assert (tensorflow.version, tensorflow.cuda, tensorflow.rocm) == ("2.21.0", cuda, rocm)


def test_tensorflow_under_another_name(site):
    add_tensorflow(site, "('is_cuda_build', False)", name="tensorflow-cpu", version="2.19.1")
    assert find_framework("tensorflow").version == "2.19.1"


def test_a_distribution_whose_module_is_gone_is_not_installed(site):
    add_distribution(site, "torch", "2.13.0")
    assert find_framework("torch") is None


def test_both(site):
    add_torch(site)
    add_tensorflow(site, "('is_cuda_build', False)")
    assert list(find_frameworks()) == ["torch", "tensorflow"]
