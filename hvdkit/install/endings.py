"""Edits for ranks that end, leave early or start anew.

A peer that dies, ``hvd.join`` and a second ``hvd.init`` must leave the other ranks with an error
or with a working Horovod, never with an abort or a hang.
"""

from hvdkit.install.edits import Edit

__all__ = ["ENDINGS"]

ENDINGS = (
    Edit(
        name="rendezvous-finished",
        path="horovod/runner/http/http_server.py",
        expected="                        self.server.finished_list.clear()\n",
        replacement="                        self.server.finished_list[scope].clear()\n",
        reason="the first scope that is complete made the server forget who had finished the "
        "others: hvd.init() after hvd.shutdown() met old addresses (connection refused) or hung",
        reference="horovod/runner/http/http_server.py: RendezvousHandler.do_DELETE",
    ),
    Edit(
        name="finalize-without-peer",
        path="horovod/common/process_set.cc",
        expected="""\
    while (true) {
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
""",
        replacement="""\
    try {
      while (true) {
        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
        if (ProcessSetHasJustBeenRemoved()) {
          break;
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
    } catch (const std::exception& ex) {
      // A peer is gone, so there is nobody to agree with: end the set here, and go on, so that
      // whoever waits for an operation is told.
      LOG(DEBUG) << "Finalizing process set " << id << " alone: " << ex.what();
      id_to_be_removed_ = NO_PENDING_REMOVAL;
      if (Contains(id)) {
        Get(id).Finalize(status);
        DeregisterProcessSet(id);
      }
    }
  }
""",
        reason="with process sets, the death of one rank aborted the others (terminate called) "
        "instead of raising HorovodInternalError",
        reference="horovod/common/process_set.cc: Finalize_",
    ),
    Edit(
        name="autotune-joined",
        path="horovod/common/tensor_queue.cc",
        expected="""\
        auto& entry = tensor_table_.at(tensor_name);
        LOG(TRACE) << "Found tensor with name " << tensor_name;
        total_tensor_size += entry.tensor->size();
""",
        replacement="""\
        auto found = tensor_table_.find(tensor_name);
        if (found == tensor_table_.end()) {
          continue; // this rank has joined
        }
        total_tensor_size += found->second.tensor->size();
""",
        reason="HOROVOD_AUTOTUNE=1 and hvd.join() ended the background thread: unordered_map::at",
        reference="horovod/common/tensor_queue.cc: GetTensorDataForAutotuner",
    ),
    Edit(
        name="autotune-lock",
        path="horovod/common/tensor_queue.cc",
        expected="  int64_t total_tensor_size = 0;\n",
        replacement="  std::lock_guard<std::mutex> guard(mutex_);\n"
        "  int64_t total_tensor_size = 0;\n",
        reason="the table is read while another thread adds to it",
        reference="horovod/common/tensor_queue.cc: GetTensorDataForAutotuner",
    ),
)
