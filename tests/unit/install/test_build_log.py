"""Reading a build's output: progress, the first real error, the hint."""

import pytest

from hvdkit.install.build_log import Failure, Progress, find_failure, read_progress

NOISE = [
    "running bdist_wheel",
    "[ 10%] Building CXX object third_party/gloo/gloo/CMakeFiles/gloo.dir/algorithm.cc.o",
    "a.cc:1:2: warning: deprecated [-Wdeprecated-declarations]",
]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[ 52%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/common.cc.o",
            Progress(52, "pytorch: common.cc"),
        ),
        (
            "  [  1%] Building CXX object third_party/gloo/gloo/CMakeFiles/gloo.dir/algorithm.cc.o",
            Progress(1, "gloo: algorithm.cc"),
        ),
        (
            "[100%] Linking CXX shared library /x/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so",
            Progress(100, "linking mpi_lib_v2"),
        ),
        (
            "[100%] Built target pytorch",
            Progress(100, "Built target pytorch"),
        ),
        ("-- Build architecture flags: -mavx", None),
        ("copying horovod/torch/[1]%", None),
    ],
)
def test_progress(line, expected):
    assert read_progress(line) == expected


@pytest.mark.parametrize(
    ("lines", "error", "hint"),
    [
        (
            [
                "/x/c10/util/C++17.h:16:2: error: #error You need C++17 to compile PyTorch",
                "make[2]: *** [common.cc.o] Error 1",
                "error: command '/usr/bin/cmake' failed",
            ],
            "/x/c10/util/C++17.h:16:2: error: #error You need C++17 to compile PyTorch",
            "gcc 9",
        ),
        (
            [
                "adapter_v2.cc:15:10: fatal error: Python.h: No such file or directory",
                "compilation terminated.",
            ],
            "adapter_v2.cc:15:10: fatal error: Python.h: No such file or directory",
            "python3-dev",
        ),
        (
            [
                "c++: fatal error: Killed signal terminated program cc1plus",
                "make: *** [all] Error 2",
            ],
            "c++: fatal error: Killed signal terminated program cc1plus",
            "--jobs 1",
        ),
        (
            [
                "CMake Error at CMakeLists.txt:142 (find_package):",
                "  Could NOT find MPI (missing: MPI_CXX_FOUND)",
                "",
                "-- Configuring incomplete, errors occurred!",
            ],
            "CMake Error at CMakeLists.txt:142 (find_package): "
            "Could NOT find MPI (missing: MPI_CXX_FOUND)",
            "--without-mpi",
        ),
        (
            [
                "CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required):",
                "  Compatibility with CMake < 3.5 has been removed from CMake.",
            ],
            "CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required): "
            "Compatibility with CMake < 3.5 has been removed from CMake.",
            "CMAKE_POLICY_VERSION_MINIMUM",
        ),
        (
            ["/usr/bin/ld: cannot find -lnccl: No such file or directory"],
            "/usr/bin/ld: cannot find -lnccl: No such file or directory",
            "",
        ),
        (
            ["a.cu(10): error: identifier is undefined", "make: *** [x] Error 255"],
            "a.cu(10): error: identifier is undefined",
            "",
        ),
        (
            ["/tmp/ccX.s: Assembler messages: No space left on device"],
            "/tmp/ccX.s: Assembler messages: No space left on device",
            "TMPDIR",
        ),
        (
            ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'x'"],
            "ModuleNotFoundError: No module named 'x'",
            "",
        ),
    ],
)
def test_the_first_real_error(lines, error, hint):
    failure = find_failure([*NOISE, *lines])
    assert failure.error.startswith(error)
    assert hint in failure.hint
    assert bool(failure.hint) is bool(hint)


def test_a_compiler_error_counts_before_what_make_says_of_it_earlier():
    lines = ["make: *** [all] Error 2", "x.cc:3:1: error: 'y' was not declared"]
    assert find_failure(lines).error == "x.cc:3:1: error: 'y' was not declared"


def test_no_known_pattern_gives_the_last_line():
    assert find_failure(["something", "odd", ""]) == Failure("odd", "")
    assert find_failure([]) == Failure("no output", "")
