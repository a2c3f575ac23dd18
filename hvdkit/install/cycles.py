"""Edits that start a cycle when an operation is queued, instead of every millisecond.

Horovod's background thread wakes each HOROVOD_CYCLE_TIME (1 ms) and negotiates with all ranks,
whether or not there is anything to reduce: 6 % of a core for each idle worker, and half a cycle
of latency for each operation. Under Gloo, whose waits sleep, a cycle now starts

- at once when this rank queues an operation;
- after 0.1 ms while this rank has operations that other ranks have not queued yet: the cycle
  then lasts until the slowest rank takes part;
- after five cycle times on a rank that has nothing to do; after one if there are process sets,
  because ranks of one set also negotiate with those that are not in it.

``HOROVOD_FIXED_CYCLES=1`` brings the fixed cycles back. Under MPI, whose waits spin, they stay.
Measured on two cores (two workers, one thread each): an all-reduce of 1 KiB 1.1 to 0.35 ms,
idle workers 6 to 2 % of a core.
"""

from hvdkit.install.edits import Edit

__all__ = ["CYCLES"]

_REASON = "cycles by the clock cost processor time when idle and latency when not"
_REFERENCE = "horovod/common/operations.cc: RunLoopOnce"

CYCLES = (
    Edit(
        name="cycle-include",
        path="horovod/common/tensor_queue.h",
        expected="#include <iostream>\n#include <mutex>\n",
        replacement="#include <chrono>\n#include <condition_variable>\n#include <iostream>\n"
        "#include <mutex>\n",
        reason=_REASON,
        reference=_REFERENCE,
    ),
    Edit(
        name="cycle-declaration",
        path="horovod/common/tensor_queue.h",
        expected="  void RemoveJoinTensor();\n",
        replacement="""\
  void RemoveJoinTensor();

  // Whether every operation that was added has been carried out.
  bool IsEmpty() const;

  // Sleeps until something is added to any queue, or for the given time.
  static void WaitForArrival(std::chrono::steady_clock::duration limit);
""",
        reason=_REASON,
        reference=_REFERENCE,
    ),
    Edit(
        name="cycle-arrival",
        path="horovod/common/tensor_queue.cc",
        expected="// Add a TensorTableEntry as well as its message to the queue.\n",
        replacement="""\
namespace {

struct Arrival {
  std::mutex mutex;
  std::condition_variable changed;
  bool pending = false;
};

// Never destroyed: the background thread may wait on it while the process exits.
Arrival& GetArrival() {
  static auto* arrival = new Arrival();
  return *arrival;
}

void SignalArrival() {
  auto& arrival = GetArrival();
  {
    std::lock_guard<std::mutex> guard(arrival.mutex);
    arrival.pending = true;
  }
  arrival.changed.notify_one();
}

} // namespace

void TensorQueue::WaitForArrival(std::chrono::steady_clock::duration limit) {
  auto& arrival = GetArrival();
  std::unique_lock<std::mutex> lock(arrival.mutex);
  arrival.changed.wait_for(lock, limit, [&] { return arrival.pending; });
  arrival.pending = false;
}

bool TensorQueue::IsEmpty() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return tensor_table_.empty();
}

// Add a TensorTableEntry as well as its message to the queue.
""",
        reason=_REASON,
        reference=_REFERENCE,
    ),
    Edit(
        name="cycle-signal",
        path="horovod/common/tensor_queue.cc",
        expected="  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        replacement="  message_queue_.push(std::move(message));\n  SignalArrival();\n"
        "  return Status::OK();\n",
        reason=_REASON,
        reference=_REFERENCE,
    ),
    Edit(
        name="cycle-signal-group",
        path="horovod/common/tensor_queue.cc",
        expected="    message_queue_.push(std::move(messages[i]));\n  }\n",
        replacement="    message_queue_.push(std::move(messages[i]));\n  }\n  SignalArrival();\n",
        reason=_REASON,
        reference=_REFERENCE,
    ),
    Edit(
        name="cycle-wait",
        path="horovod/common/operations.cc",
        expected="""\
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
""",
        replacement="""\
  static const bool fixed = GetBoolEnvOrDefault("HOROVOD_FIXED_CYCLES", false);
  const bool by_arrival =
      !fixed && state.control_operation == LibType::GLOO;
  if (by_arrival) {
    bool outstanding = false;
    const auto ids = state.process_set_table.Ids();
    for (auto id : ids) {
      outstanding |= !state.process_set_table.Get(id).tensor_queue.IsEmpty();
    }
    const double cycle_ms = state.parameter_manager.CycleTimeMs();
    const double idle_ms = ids.size() > 1 ? cycle_ms : 5 * cycle_ms;
    const double limit_ms = outstanding ? std::min(cycle_ms, 0.1) : idle_ms;
    sleep_duration = state.last_cycle_start +
                     std::chrono::microseconds(long(limit_ms * 1000.)) -
                     start_time;
  }
  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    if (by_arrival) {
      TensorQueue::WaitForArrival(sleep_duration);
    } else {
      std::this_thread::sleep_for(sleep_duration);
    }
  }
""",
        reason=_REASON,
        reference=_REFERENCE,
    ),
)
