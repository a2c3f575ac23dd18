"""Edits that make waits sleep instead of spin.

Horovod's ``synchronize`` for PyTorch polls in a loop that yields, and Gloo's thread polls a socket
whose lock another thread has. Both loops keep a core busy that the computation, Horovod's own
background thread or the holder of the lock needs: two workers on two cores have many threads.
``HOROVOD_SPIN_WAIT=1`` brings the loops back, for cores to spare and for comparisons with stock.
Measured on two cores: ``synchronize``, other work beside: 1 KiB 3.5 to 1.1 ms, sixteen overlapped
all-reduces 100 to 63 ms, processor time 7.6 to 3.9 s; Gloo's thread, a training step in TensorFlow
with 33 MB of gradients: 80 to 67 ms, of which 8 ms were spent in the kernel for nothing.
"""

from hvdkit.install.edits import Edit, When

__all__ = ["WAITING"]

_TORCH = When("torch")
_REASON = "a wait that spins takes the core from the thread that does the communication"
_REFERENCE = "horovod/torch/mpi_ops_v2.cc: WaitAndClear"

_GLOO = "third_party/gloo/gloo/transport/tcp/pair.cc"

WAITING = (
    Edit(
        name="wait-include",
        path="horovod/torch/handle_manager.h",
        expected="#include <atomic>\n",
        replacement="#include <atomic>\n#include <condition_variable>\n",
        reason=_REASON,
        reference=_REFERENCE,
        when=_TORCH,
    ),
    Edit(
        name="wait-declaration",
        path="horovod/torch/handle_manager.h",
        expected="  bool PollHandle(int handle);\n",
        replacement="  bool PollHandle(int handle);\n"
        "  // Sleeps until the operation is done or the handle is gone.\n"
        "  void WaitHandle(int handle);\n",
        reason=_REASON,
        reference=_REFERENCE,
        when=_TORCH,
    ),
    Edit(
        name="wait-member",
        path="horovod/torch/handle_manager.h",
        expected="  std::mutex mutex_;\n",
        replacement="  std::mutex mutex_;\n  std::condition_variable changed_;\n",
        reason=_REASON,
        reference=_REFERENCE,
        when=_TORCH,
    ),
    Edit(
        name="wait-notify",
        path="horovod/torch/handle_manager.cc",
        expected="""\
  std::lock_guard<std::mutex> guard(mutex_);
  results_[handle] = std::make_shared<Status>(status);
}
""",
        replacement="""\
  {
    std::lock_guard<std::mutex> guard(mutex_);
    results_[handle] = std::make_shared<Status>(status);
  }
  changed_.notify_all();
}

void HandleManager::WaitHandle(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
}
""",
        reason=_REASON,
        reference=_REFERENCE,
        when=_TORCH,
    ),
    Edit(
        name="wait-reset",
        path="horovod/torch/handle_manager.cc",
        expected="  results_.clear();\n  last_handle_ = 0;\n",
        replacement="  results_.clear();\n  last_handle_ = 0;\n  changed_.notify_all();\n",
        reason="a wait for a handle that is cleared ends with an error, as it did before",
        reference=_REFERENCE,
        when=_TORCH,
    ),
    Edit(
        name="wait-at-exit",
        path="horovod/torch/mpi_ops_v2.cc",
        expected="static HandleManager handle_manager;\n",
        replacement="// Never destroyed: that would last until no thread waits.\n"
        "static HandleManager& handle_manager = *new HandleManager();\n",
        reason="a process that exits by C's exit() while a thread waits would hang",
        reference="glibc >= 2.25, nptl/pthread_cond_destroy.c",
        when=_TORCH,
    ),
    Edit(
        name="wait-setting",
        path="horovod/torch/mpi_ops_v2.cc",
        expected='#include "../common/ops/collective_operations.h"\n',
        replacement='#include "../common/ops/collective_operations.h"\n'
        '#include "../common/utils/env_parser.h"\n',
        reason=_REASON,
        reference=_REFERENCE,
        when=_TORCH,
    ),
    Edit(
        name="wait-sleeps",
        path="horovod/torch/mpi_ops_v2.cc",
        expected="""\
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
""",
        replacement="""\
  static const bool spins =
      ::horovod::common::GetBoolEnvOrDefault("HOROVOD_SPIN_WAIT", false);
  while (!handle_manager.PollHandle(handle)) {
    py::gil_scoped_release release_python_gil;
    if (spins) {
      std::this_thread::yield();
    } else {
      handle_manager.WaitHandle(handle);
    }
  }
""",
        reason=_REASON,
        reference=_REFERENCE,
        when=_TORCH,
    ),
    Edit(
        name="wait-gloo-include",
        path=_GLOO,
        expected="#include <algorithm>\n",
        replacement="#include <algorithm>\n#include <chrono>\n#include <cstdlib>\n"
        "#include <thread>\n",
        reason=_REASON,
        reference=_GLOO,
    ),
    Edit(
        name="wait-gloo",
        path=_GLOO,
        expected="""\
  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    return;
  }

  // State must be <= CONNECTED.
""",
        replacement="""\
  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    static const char* setting = std::getenv("HOROVOD_SPIN_WAIT");
    static const bool spins = setting != nullptr && std::atoi(setting) > 0;
    if (!spins) {
      // The thread that has the lock may be waiting for this core.
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return;
  }

  // State must be <= CONNECTED.
""",
        reason="the event is still there: epoll_wait returns at once, again and again",
        reference=_GLOO,
    ),
)
