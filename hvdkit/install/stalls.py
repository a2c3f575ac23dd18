"""Edits for ranks that miss an operation: after one limit, counted right, the job ends.

``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` is that limit; the error on all ranks names the ranks that
are missing and the operations that they have not started.
"""

from hvdkit.install.edits import Edit

__all__ = ["STALLS"]

_NAMED = "the error of the other ranks did not say which rank was missing, nor for what they waited"
_INSPECTOR = "horovod/common/stall_inspector.cc"

STALLS = (
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
