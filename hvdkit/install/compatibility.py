"""The compatibility edits that Horovod 0.28.1 needs, one record each.

To add one: give the exact text of the unmodified source, a reason that names the failure, and
a reference. Edits of the same file are applied in the order of the list.
"""

from hvdkit.install.addresses import ADDRESSES
from hvdkit.install.cycles import CYCLES
from hvdkit.install.edits import Edit, When
from hvdkit.install.endings import ENDINGS
from hvdkit.install.losses import LOSSES
from hvdkit.install.stalls import STALLS
from hvdkit.install.told import TOLD
from hvdkit.install.transfers import TRANSFERS
from hvdkit.install.waiting import WAITING
from hvdkit.install.worker_start import WORKER_START

__all__ = ["EDITS"]

_XLA_GUARD = """\
#if TENSORFLOW_VERSION >= 2006000000

#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
"""

_STREAM_DECLARATION = """\
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
"""

_STREAM_DEFINITION = """\
#include "tensorflow/compiler/xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(
      stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""

_RECORD_READER = '''\
def _recorded_controllers():
    """Controllers of this build as hvdkit recorded them, or None."""
    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'hvdkit_build.json')
    try:
        with open(path) as f:
            return json.load(f)['controllers']
    except (OSError, ValueError, KeyError):
        return None


@_cache
def mpi_built(verbose=False):
    recorded = _recorded_controllers()
    if recorded is not None:
        return 'mpi' in recorded
'''

LANGUAGE = (
    Edit(
        name="cxx17",
        path="CMakeLists.txt",
        expected="set(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)",
        replacement="set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)",
        reason="torch >= 2.1 and TensorFlow >= 2.10 have headers that need C++17",
        reference="horovod/horovod#3941",
    ),
    Edit(
        name="cxx17-torch",
        path="horovod/torch/CMakeLists.txt",
        expected="    set(CMAKE_CXX_STANDARD 14)\n",
        replacement="    set(CMAKE_CXX_STANDARD 17)\n",
        reason="torch >= 2.1 headers stop with an #error before C++17",
        reference="horovod/horovod#3941",
        when=When("torch", at_least=(2, 1)),
    ),
    Edit(
        name="includes-common",
        path="horovod/common/common.h",
        expected="#include <functional>\n#include <memory>\n#include <string>\n",
        replacement=(
            "#include <cstdint>\n#include <functional>\n#include <memory>\n"
            "#include <stdexcept>\n#include <string>\n"
        ),
        reason="gcc >= 13 no longer includes <stdexcept> and <cstdint> through other headers",
        reference="horovod/horovod#3957",
    ),
    Edit(
        name="includes-group-table",
        path="horovod/common/group_table.h",
        expected="#include <queue>\n#include <unordered_map>\n",
        replacement="#include <cstdint>\n#include <queue>\n#include <string>\n"
        "#include <unordered_map>\n",
        reason="gcc >= 13 no longer includes <string> through <mutex>",
        reference="horovod/horovod#3957",
    ),
    Edit(
        name="includes-gloo",
        path="third_party/gloo/gloo/types.h",
        expected="#pragma once\n\n#include <iostream>\n",
        replacement="#pragma once\n\n#include <cstdint>\n#include <iostream>\n",
        reason="gcc >= 13 no longer includes <cstdint> through <iostream>",
        reference="https://gcc.gnu.org/gcc-13/porting_to.html",
    ),
)

PACKAGING = (
    Edit(
        name="no-setup-requires",
        path="setup.py",
        expected="      setup_requires=require_list if is_build_action() else [],\n",
        replacement="",
        reason="the build would fetch run-time dependencies that it does not use",
        reference="setup.py; setup_requires is deprecated in setuptools",
    ),
    Edit(
        name="build-record",
        path="setup.py",
        expected="      packages=find_packages(),\n",
        replacement="      packages=find_packages(),\n"
        "      package_data={'horovod': ['hvdkit_build.json']},\n",
        reason="the wheel says what it was built against, for `hvdkit doctor`",
        reference="hvdkit",
    ),
    Edit(
        name="python-headers",
        path="horovod/torch/CMakeLists.txt",
        expected='"from distutils.sysconfig import get_python_inc; print(get_python_inc())"',
        replacement="\"import sysconfig; print(sysconfig.get_path('include'))\"",
        reason="Python >= 3.12 has no distutils: the folder of Python.h would be empty",
        reference="https://peps.python.org/pep-0632/",
        when=When("torch"),
    ),
    Edit(
        name="find-executable",
        path="horovod/runner/js_run.py",
        expected="from distutils.spawn import find_executable\n",
        replacement="from shutil import which as find_executable\n",
        reason="horovodrun fails to start on Python >= 3.12 without setuptools",
        reference="https://peps.python.org/pep-0632/",
    ),
)

TENSORFLOW = (
    Edit(
        name="xla-gpu-only",
        path="horovod/tensorflow/xla_mpi_ops.cc",
        expected=_XLA_GUARD,
        replacement=_XLA_GUARD.replace("2006000000", "2006000000 && HAVE_GPU"),
        reason="without a GPU the file is nothing but includes, of headers that move between "
        "releases and take 40 s to compile",
        reference="horovod/tensorflow/xla_mpi_ops.cc",
        when=When("tensorflow"),
    ),
    Edit(
        name="xla-off-2.19",
        path="horovod/tensorflow/xla_mpi_ops.cc",
        expected="#if TENSORFLOW_VERSION >= 2006000000 && HAVE_GPU\n",
        replacement="#if 0  // TensorFlow 2.19 does not ship the headers\n",
        reason="TensorFlow 2.19 headers include LLVM's, which it does not ship; only the "
        "optional XLA operations on GPUs (HOROVOD_ENABLE_XLA_OPS) are left out",
        reference="tensorflow 2.19.0: xla/stream_executor/gpu/tma_metadata.h",
        when=When("tensorflow", at_least=(2, 19), below=(2, 20)),
    ),
    Edit(
        name="xla-builder-header",
        path="horovod/tensorflow/xla_mpi_ops.cc",
        expected='#include "tensorflow/compiler/xla/client/xla_builder.h"',
        replacement='#include "tensorflow/compiler/xla/hlo/builder/xla_builder.h"',
        reason="the header moved in TensorFlow 2.19",
        reference="tensorflow 2.19.0: xla/hlo/builder/xla_builder.h",
        when=When("tensorflow", at_least=(2, 19)),
    ),
    Edit(
        name="absl-status-or",
        path="horovod/tensorflow/xla_mpi_ops.cc",
        expected="::xla::StatusOr<::xla::XlaOp>",
        replacement="absl::StatusOr<::xla::XlaOp>",
        reason="the alias xla::StatusOr is gone in TensorFlow 2.19; it meant absl::StatusOr before",
        reference="tensorflow 2.16.1: tsl/platform/statusor.h",
        when=When("tensorflow", at_least=(2, 16)),
        count=2,
    ),
    Edit(
        name="tensorflow-bundled-headers",
        path="horovod/tensorflow/CMakeLists.txt",
        expected="include_directories(SYSTEM ${Tensorflow_INCLUDE_DIRS})",
        replacement="include_directories(SYSTEM ${Tensorflow_INCLUDE_DIRS}\n"
        "    ${Tensorflow_INCLUDE_DIRS}/external/highwayhash\n"
        "    ${Tensorflow_INCLUDE_DIRS}/external/farmhash_archive/src)",
        reason="TensorFlow 2.21 headers include highwayhash and farmhash by their own paths",
        reference="tensorflow 2.21.0: tensorflow/core/platform/fingerprint.h",
        when=When("tensorflow", at_least=(2, 21)),
    ),
    Edit(
        name="tensorflow-gpu-stream",
        path="horovod/tensorflow/mpi_ops.cc",
        expected=_STREAM_DECLARATION,
        replacement=_STREAM_DEFINITION,
        reason="TensorFlow 2.21 does not export AsGpuStreamValue; the public platform handle "
        "holds the same CUDA or HIP stream",
        reference="tensorflow 2.16.1: xla/stream_executor/stream.h",
        when=When("tensorflow", at_least=(2, 16)),
    ),
)

CUDA = (
    Edit(
        name="cuda-standard",
        path="horovod/common/ops/cuda/CMakeLists.txt",
        expected="set(CMAKE_CUDA_STANDARD 11)",
        replacement="set(CMAKE_CUDA_STANDARD 17)",
        reason="the headers of gcc >= 14 do not compile under nvcc in C++11",
        reference="horovod/horovod#4313",
    ),
    Edit(
        name="cuda-standard-ppc64le",
        path="CMakeLists.txt",
        expected='set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -std=c++11")',
        replacement='set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -std=c++17")',
        reason="the flag would contradict the standard that the kernels ask for",
        reference="horovod/horovod#4313",
    ),
)

NCCL = (
    Edit(
        name="nccl-from-wheel",
        path="cmake/Modules/FindNCCL.cmake",
        expected='    set(NCCL_LIBNAME "nccl")\n',
        replacement="    set(NCCL_LIBNAME nccl libnccl.so.2)\n",
        reason="the NCCL that comes with CUDA builds of torch has no libnccl.so without the .2",
        reference="cmake/Modules/FindNCCL.cmake",
    ),
)

BEHAVIOUR = (
    Edit(
        name="gloo-stall-ranks",
        path="horovod/common/gloo/gloo_controller.cc",
        expected="  global_ranks_.reserve(size_);",
        replacement="  global_ranks_.resize(size_);",
        reason="with an empty vector of ranks the stall inspector finds nothing under Gloo: no "
        "warning, no shutdown",
        reference="horovod/common/stall_inspector.cc",
    ),
    Edit(
        name="launch-mpi",
        path="horovod/common/util.py",
        expected="@_cache\ndef mpi_built(verbose=False):\n",
        replacement=_RECORD_READER,
        reason="horovodrun imports a whole framework to learn whether MPI is built in",
        reference="horovod/runner/launch.py",
    ),
    Edit(
        name="launch-gloo",
        path="horovod/common/util.py",
        expected="@_cache\ndef gloo_built(verbose=False):\n",
        replacement="@_cache\ndef gloo_built(verbose=False):\n"
        "    recorded = _recorded_controllers()\n"
        "    if recorded is not None:\n"
        "        return 'gloo' in recorded\n",
        reason="as launch-mpi: about 4 s less for each start of horovodrun",
        reference="horovod/runner/launch.py",
    ),
    Edit(
        name="launch-no-workers",
        path="horovod/runner/launch.py",
        expected="    # if hosts are not specified, either parse from hostfile, or default as\n",
        replacement="    if args.num_proc is not None and args.num_proc < 1:\n"
        "        raise ValueError(f'-np must be at least 1, got {args.num_proc}')\n\n"
        "    # if hosts are not specified, either parse from hostfile, or default as\n",
        reason="horovodrun -np 0 started nothing and reported success",
        reference="horovod/runner/launch.py",
    ),
)

EDITS = (
    *LANGUAGE,
    *PACKAGING,
    *TENSORFLOW,
    *CUDA,
    *NCCL,
    *BEHAVIOUR,
    *ENDINGS,
    *LOSSES,
    *TOLD,
    *STALLS,
    *ADDRESSES,
    *WORKER_START,
    *WAITING,
    *CYCLES,
    *TRANSFERS,
)
