"""Edits for the loss of a rank: the others end soon, and their error names who is missing.

A rank that dies, stops, ends early or misses an operation leaves the others with an error within
``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` (stalls), ``HOROVOD_GLOO_TIMEOUT_SECONDS`` (a process that
is stopped, a host that is cut off) or at once (a process that ends). ``lost_ranks.h`` finds out
who it was.
"""

from pathlib import Path

from hvdkit.install.edits import Edit

__all__ = ["LOSSES"]

_NAMED = "the error of the other ranks did not say which rank was missing, nor for what they waited"
_INSPECTOR = "horovod/common/stall_inspector.cc"
_OPERATIONS = "horovod/common/operations.cc"

LOSSES = (
    Edit(
        name="lost-declarations",
        path="horovod/common/stall_inspector.h",
        expected="class ResponseCache;\n\nclass StallInspector {\n",
        replacement="""\
class ResponseCache;

// What the ranks that are left know of those that are not; see http_store.cc.
namespace lost_ranks {

// Starts anew: this process is one of the ranks of a job that `id` names.
void Begin(const std::string& server, int port, uint64_t id, int rank, int size);

// Says that this rank is there and did not ask for the end. Returns false if it said so before.
bool Note(const std::string& cause);
bool Noted();

// Tells all ranks why the coordinator ends the job.
void ReportStall(const std::string& reason);

// Returns an error's text without the place in the source where it was made.
std::string WithoutPlace(const std::string& text);

// Returns what to tell whoever waits for these operations.
std::string Explain(const std::vector<std::string>& names);

} // namespace lost_ranks

class StallInspector {
""",
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-includes",
        path="horovod/common/gloo/http_store.cc",
        expected="#include <cstring>\n",
        replacement="#include <cstring>\n#include <future>\n#include <mutex>\n#include <set>\n"
        "#include <sstream>\n",
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-definitions",
        path="horovod/common/gloo/http_store.cc",
        expected="""\
  PerformHTTP(request, HTTP_DELETE_METHOD);
}

} // namespace common
} // namespace horovod
""",
        replacement="""\
  PerformHTTP(request, HTTP_DELETE_METHOD);
}

} // namespace common
} // namespace horovod

"""
        + Path(__file__).with_name("lost_ranks.h").read_text(encoding="utf-8"),
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-store-include",
        path="horovod/common/gloo/http_store.cc",
        expected='#include "../logging.h"\n',
        replacement='#include "../logging.h"\n#include "../stall_inspector.h"\n',
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-keys",
        path="horovod/runner/http/http_server.py",
        expected="            return self.server.cache.get(scope, {}).get(key)\n",
        replacement="            if key == '*':  # the keys that are there, a line each\n"
        "                return '\\n'.join(self.server.cache.get(scope, {})).encode()\n"
        "            return self.server.cache.get(scope, {}).get(key)\n",
        reason="with a thousand ranks each cannot ask for each",
        reference="horovod/runner/http/http_server.py: KVStoreHandler",
    ),
    Edit(
        name="lost-begin-include",
        path="horovod/common/gloo/gloo_context.cc",
        expected='#include "gloo/barrier.h"\n',
        replacement='#include "gloo/barrier.h"\n#include "gloo/broadcast.h"\n',
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-begin-include-inspector",
        path="horovod/common/gloo/gloo_context.cc",
        expected="#include <chrono>\n#include <iterator>\n#include <memory>\n#include <numeric>\n",
        replacement="#include <chrono>\n#include <iterator>\n#include <memory>\n"
        '#include <numeric>\n#include <random>\n\n#include "../stall_inspector.h"\n\n',
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-begin",
        path="horovod/common/gloo/gloo_context.cc",
        expected="""\
  LOG(DEBUG) << "Global Gloo context initialized.";

  global_ctx = ctx;
""",
        replacement="""\
  LOG(DEBUG) << "Global Gloo context initialized.";

  global_ctx = ctx;

  uint64_t id = std::random_device{}();
  if (size > 1) {
    // A number that no earlier job of the same server had.
    gloo::BroadcastOptions opts(ctx);
    opts.setOutput(&id, 1);
    opts.setRoot(0);
    gloo::broadcast(opts);
  }
  lost_ranks::Begin(rendezvous_addr_env != nullptr && !elastic
                        ? std::string(rendezvous_addr_env)
                        : std::string(),
                    rendezvous_port, id, rank, size);
""",
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-close",
        path="third_party/gloo/gloo/transport/tcp/pair.cc",
        expected="""\
      setsockopt(fd_, SOL_SOCKET, SO_LINGER, &sl, sizeof(sl));
    }
    changeState(CLOSED);
""",
        replacement="""\
      setsockopt(fd_, SOL_SOCKET, SO_LINGER, &sl, sizeof(sl));
    }
    if (ex_ == nullptr) {
      // Operations that come later are told, and do not wait for the timeout.
      signalException(GLOO_ERROR_MSG("Connection closed after a failure"));
      return;
    }
    changeState(CLOSED);
""",
        reason="an operation on a connection that was closed waited for its timeout",
        reference="third_party/gloo/gloo/transport/tcp/pair.cc: Pair::close",
    ),
    Edit(
        name="lost-close-declaration",
        path="horovod/common/gloo/gloo_context.h",
        expected="  void Finalize();\n",
        replacement="  void Finalize();\n\n"
        "  // Lets the other ranks know at once that this one goes no further.\n"
        "  void CloseConnections();\n",
        reason="a rank that failed kept its connections open, and others waited 30 s for it",
        reference="horovod/common/gloo/gloo_context.cc",
    ),
    Edit(
        name="lost-close-definition",
        path="horovod/common/gloo/gloo_context.cc",
        expected="void GlooContext::Finalize() {\n",
        replacement="""\
void GlooContext::CloseConnections() {
  for (const auto& context : {ctx, local_ctx, cross_ctx}) {
    if (context != nullptr) {
      context->closeConnections();
    }
  }
}

void GlooContext::Finalize() {
""",
        reason="a rank that failed kept its connections open, and others waited 30 s for it",
        reference="horovod/common/gloo/gloo_context.cc",
    ),
    Edit(
        name="lost-pending-declaration",
        path="horovod/common/tensor_queue.h",
        expected="  void FinalizeTensorQueue(const Status& status);\n",
        replacement="  void FinalizeTensorQueue(const Status& status);\n\n"
        "  // Names of the operations that wait to be carried out, sorted.\n"
        "  std::vector<std::string> PendingNames() const;\n",
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-pending-definition",
        path="horovod/common/tensor_queue.cc",
        expected="// Execute callback for each tensor and clear tensor queue\n",
        replacement="""\
std::vector<std::string> TensorQueue::PendingNames() const {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<std::string> names;
  for (const auto& entry : tensor_table_) {
    names.push_back(entry.first);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Execute callback for each tensor and clear tensor queue
""",
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-pending-include",
        path="horovod/common/tensor_queue.cc",
        expected="#include <assert.h>\n",
        replacement="#include <assert.h>\n\n#include <algorithm>\n",
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="lost-note",
        path=_OPERATIONS,
        expected="""\
// Process a Response by doing a reduction, a gather, a broadcast, or
// raising an error.
""",
        replacement="""\
// This rank can go no further, and did not ask for the end. Before it asks who is missing it
// closes its connections: the others must not wait for it meanwhile.
void NoteLoss(const std::string& cause) {
  if (lost_ranks::Noted()) {
    return;
  }
#if HAVE_GLOO
  for (auto id : horovod_global.process_set_table.Ids()) {
    horovod_global.process_set_table.Get(id).gloo_context.CloseConnections();
  }
  global_gloo_context.CloseConnections();
#endif
  lost_ranks::Note(cause);
}

std::vector<std::string> ListPending() {
  std::vector<std::string> pending;
  for (auto id : horovod_global.process_set_table.Ids()) {
    auto names =
        horovod_global.process_set_table.Get(id).tensor_queue.PendingNames();
    pending.insert(pending.end(), names.begin(), names.end());
  }
  return pending;
}

// What an operation is told that comes after the end.
Status EndedStatus(const std::vector<std::string>& names) {
  return lost_ranks::Noted() ? Status::UnknownError(lost_ranks::Explain(names))
                             : SHUT_DOWN_ERROR;
}

// Process a Response by doing a reduction, a gather, a broadcast, or
// raising an error.
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-in-operation",
        path=_OPERATIONS,
        expected="""\
    status = op_manager->ExecuteOperation(entries, response, process_set);
  } catch (const std::exception& ex) {
    LOG(DEBUG, horovod_global.global_controller->GetRank())
        << "ExecuteOperation Failed";
    status = Status::UnknownError(ex.what());
  }
""",
        replacement="""\
    if (lost_ranks::Noted()) {
      throw std::runtime_error("an operation before this one failed");
    }
    status = op_manager->ExecuteOperation(entries, response, process_set);
  } catch (const std::exception& ex) {
    LOG(DEBUG, horovod_global.global_controller->GetRank())
        << "ExecuteOperation Failed";
    NoteLoss(ex.what());
    status = Status::UnknownError(
        lost_ranks::Explain({response.tensor_names_string()}));
  }
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-ends-the-loop",
        path=_OPERATIONS,
        expected="""\
  // Iterate until shutdown.
  try {
    while (RunLoopOnce(state))
      ;
  } catch (const std::exception& ex) {
    LOG(ERROR, horovod_global.global_controller->GetRank())
        << "Horovod background loop uncaught exception: " << ex.what();
  }
""",
        replacement="""\
  // Iterate until shutdown, or until an operation has failed.
  try {
    while (!lost_ranks::Noted() && RunLoopOnce(state))
      ;
    if (!state.shut_down) {
      lost_ranks::Note(""); // all ranks end now, because one of them wanted to
    }
  } catch (const std::exception& ex) {
    LOG(DEBUG, horovod_global.global_controller->GetRank())
        << "Horovod background loop uncaught exception: " << ex.what();
    NoteLoss(ex.what());
  }
""",
        reason="after an operation that failed on some ranks a further round of negotiation waited "
        "for ranks that did not take part",
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-at-the-end",
        path=_OPERATIONS,
        expected="""\
  // Signal that shutdown has been requested.
  state.shut_down = true;

  // For each process set""",
        replacement="""\
  // Signal that shutdown has been requested.
  state.shut_down = true;
  const auto pending = ListPending();
  const Status ended = pending.empty() || !lost_ranks::Noted()
                           ? SHUT_DOWN_ERROR
                           : Status::UnknownError(lost_ranks::Explain(pending));

  // For each process set""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-status-mpi",
        path=_OPERATIONS,
        expected="""\
    horovod_global.process_set_table.Finalize(global_mpi_context,
                                              SHUT_DOWN_ERROR);
""",
        replacement="""\
    horovod_global.process_set_table.Finalize(global_mpi_context, ended);
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-status-gloo",
        path=_OPERATIONS,
        expected="""\
    horovod_global.process_set_table.Finalize(global_gloo_context,
                                              SHUT_DOWN_ERROR);
""",
        replacement="""\
    horovod_global.process_set_table.Finalize(global_gloo_context, ended);
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-status-late-allreduces",
        path=_OPERATIONS,
        expected="""\
    return SHUT_DOWN_ERROR;
  }
  auto& process_set = horovod_global.process_set_table.Get(process_set_id);
  Status status;
""",
        replacement="""\
    return EndedStatus(names);
  }
  auto& process_set = horovod_global.process_set_table.Get(process_set_id);
  Status status;
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-status-late-reducescatters",
        path=_OPERATIONS,
        expected="""\
    return SHUT_DOWN_ERROR;
  }

  auto& process_set = horovod_global.process_set_table.Get(process_set_id);
  switch (reduce_op) {
""",
        replacement="""\
    return EndedStatus(names);
  }

  auto& process_set = horovod_global.process_set_table.Get(process_set_id);
  switch (reduce_op) {
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-status-late-allgathers",
        path=_OPERATIONS,
        expected="""\
    return SHUT_DOWN_ERROR;
  }
  auto& process_set = horovod_global.process_set_table.Get(process_set_id);

  if (!process_set.IsCurrentProcessIncluded()) {
    return Status::InvalidArgument(
        "Allgather: Rank " +
""",
        replacement="""\
    return EndedStatus(names);
  }
  auto& process_set = horovod_global.process_set_table.Get(process_set_id);

  if (!process_set.IsCurrentProcessIncluded()) {
    return Status::InvalidArgument(
        "Allgather: Rank " +
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-status-late-barrier",
        path=_OPERATIONS,
        expected="""\
Status EnqueueBarrier(StatusCallback callback, int32_t process_set_id) {
  if (horovod_global.shut_down) {
    return SHUT_DOWN_ERROR;
""",
        replacement="""\
Status EnqueueBarrier(StatusCallback callback, int32_t process_set_id) {
  if (horovod_global.shut_down) {
    return EndedStatus({"barrier"});
""",
        reason=_NAMED,
        reference=_OPERATIONS,
    ),
    Edit(
        name="lost-status-late",
        path=_OPERATIONS,
        expected="    return SHUT_DOWN_ERROR;\n",
        replacement="    return EndedStatus({name});\n",
        reason=_NAMED,
        reference=_OPERATIONS,
        count=3,
    ),
    Edit(
        name="stall-one-limit",
        path=_INSPECTOR,
        expected="""\
    LOG(WARNING) << "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is less than "
                    "HOROVOD_STALL_CHECK_TIME_SECONDS, will not shutdown.";
    stall_shutdown_time = std::chrono::seconds(0);
""",
        replacement="    stall_warning_time = stall_shutdown_time;\n",
        reason="a limit below that of the warning (60 s by default) was none",
        reference=_INSPECTOR,
    ),
    Edit(
        name="stall-report",
        path=_INSPECTOR,
        expected="""\
          << stall_shutdown_time.count() << " seconds. Will shutdown.";
      LOG(ERROR) << message.str();
    } else {
      LOG(WARNING) << message.str();
    }
""",
        replacement="""\
          << stall_shutdown_time.count() << " seconds. Will shutdown.";
      LOG(ERROR) << message.str();
      std::stringstream reason;
      for (const auto& missing : missing_ranks) {
        if (shutdown_ranks.count(missing.first) == 0) {
          continue;
        }
        reason << (reason.tellp() > 0 ? "; " : "") << "rank "
               << global_ranks[missing.first] << " has not started ";
        size_t shown = 0;
        for (const auto& name : missing.second) {
          if (++shown > 6) {
            reason << ", ... (" << missing.second.size() << " in all)";
            break;
          }
          reason << (shown > 1 ? ", " : "") << name;
        }
      }
      reason << ", for which others have waited longer than "
             << stall_shutdown_time.count()
             << " s (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, 0 for no limit)";
      lost_ranks::ReportStall(reason.str());
    } else if (now - last_warning > stall_warning_time) {
      LOG(WARNING) << message.str();
      last_warning = now;
    }
""",
        reason=_NAMED,
        reference=_INSPECTOR,
    ),
    Edit(
        name="stall-last-warning",
        path="horovod/common/stall_inspector.h",
        expected="  std::chrono::steady_clock::time_point last_stall_check;\n",
        replacement="  std::chrono::steady_clock::time_point last_stall_check;\n\n"
        "  std::chrono::steady_clock::time_point last_warning;\n",
        reason="looks are more frequent than warnings",
        reference=_INSPECTOR,
    ),
    Edit(
        name="stall-look-each-second",
        path=_INSPECTOR,
        expected="""\
         std::chrono::steady_clock::now() - last_stall_check >
             std::chrono::seconds(stall_warning_time_seconds);
""",
        replacement="""\
         std::chrono::steady_clock::now() - last_stall_check >
             std::chrono::seconds(std::min(stall_warning_time_seconds, 1));
""",
        reason="a stall was found up to twice the time of a warning too late",
        reference=_INSPECTOR,
    ),
    Edit(
        name="stall-cached",
        path=_INSPECTOR,
        expected="""\
  std::chrono::seconds stall_warning_time(stall_warning_time_seconds);

  for (auto& entry : cached_tensor_table) {
""",
        replacement="""\
  // Only then does the coordinator see who is missing, and the time run.
  std::chrono::seconds stall_warning_time(std::min(stall_warning_time_seconds, 2));

  for (auto& entry : cached_tensor_table) {
""",
        reason="the time of an operation that had run before was counted from the warning on",
        reference=_INSPECTOR,
    ),
    Edit(
        name="stall-includes",
        path=_INSPECTOR,
        expected="#include <map>\n#include <unordered_set>\n",
        replacement="#include <algorithm>\n#include <map>\n#include <unordered_set>\n",
        reason="std::min",
        reference=_INSPECTOR,
    ),
)
