"""Edits for the loss of a rank: the others find out soon who is missing.

Who fails closes its connections and leaves its number at the rendezvous server (``lost_ranks.h``);
whose number is not there is lost. ``told.py`` brings that to whoever waits, ``stalls.py`` ends what
would wait for ever.
"""

from pathlib import Path

from hvdkit.install.edits import Edit

__all__ = ["LOSSES"]

_NAMED = "the error of the other ranks did not say which rank was missing, nor for what they waited"
_INSPECTOR = "horovod/common/stall_inspector.cc"

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
        name="lost-while-connecting",
        path="third_party/gloo/gloo/transport/tcp/pair.h",
        expected="        timeout_ * 5,\n",
        replacement="        timeout_,\n",
        reason="a rank that died between giving its address and connecting was waited for five "
        "times as long as HOROVOD_GLOO_TIMEOUT_SECONDS says: an elastic job that lost two ranks in "
        "a row stood still for 150 s",
        reference="third_party/gloo/gloo/transport/tcp/pair.h: waitUntil",
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
)
