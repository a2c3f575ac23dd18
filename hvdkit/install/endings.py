"""Edits for ranks that end, leave early or start anew.

A peer that dies or never comes, ``hvd.join`` and a second ``hvd.init`` must leave the other ranks
with an error or with a working Horovod, never with an abort or a hang.
"""

from hvdkit.install.edits import Edit

__all__ = ["ENDINGS"]

_UNCONNECTED = (
    "hvd.init() aborted the process (terminate called) where the other workers or the rendezvous "
    "server could not be reached"
)
_BACKGROUND = "horovod/common/operations.cc: BackgroundThreadLoop"
_ORPHANS = (
    "children of a worker that failed stayed, and horovodrun waited for them; a worker whose "
    "middleman was killed went on"
)
_LAST_WORDS = "horovodrun terminated the other workers before they could say what went wrong"

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
        name="init-error-declaration",
        path="horovod/common/global_state.h",
        expected="  std::atomic_bool initialization_failed{false};\n",
        replacement="  std::atomic_bool initialization_failed{false};\n"
        "  std::string initialization_error;\n",
        reason=_UNCONNECTED,
        reference=_BACKGROUND,
    ),
    Edit(
        name="init-error-caught",
        path="horovod/common/operations.cc",
        expected="""\
#if HAVE_GLOO
#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context if mpi context is available
""",
        replacement="""\
  lost_ranks::Begin("", 0, 0, 0, 1);
#if HAVE_GLOO
  try {
#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context if mpi context is available
""",
        reason=_UNCONNECTED,
        reference=_BACKGROUND,
    ),
    Edit(
        name="init-error-kept",
        path="horovod/common/operations.cc",
        expected="""\
    state.process_set_table.Initialize(global_gloo_context);
  }
#endif // HAVE_GLOO

  assert(state.global_controller->IsInitialized());
""",
        replacement="""\
    state.process_set_table.Initialize(global_gloo_context);
  }
  } catch (const std::exception& ex) {
    state.initialization_error = lost_ranks::WithoutPlace(ex.what());
    state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
    global_gloo_context.Finalize();
    state.initialization_failed = true;
    return;
  }
#endif // HAVE_GLOO

  assert(state.global_controller->IsInitialized());
""",
        reason=_UNCONNECTED,
        reference=_BACKGROUND,
    ),
    Edit(
        name="init-error-of-process-sets",
        path="horovod/common/operations.cc",
        expected="    state.initialization_failed = true;\n    goto shutdown;\n",
        replacement="    state.initialization_error = lost_ranks::WithoutPlace(ex.what());\n"
        "    state.initialization_failed = true;\n    goto shutdown;\n",
        reason=_UNCONNECTED,
        reference=_BACKGROUND,
    ),
    Edit(
        name="init-error-forgotten",
        path="horovod/common/operations.cc",
        expected="    horovod_global.shut_down = false;\n"
        "    horovod_global.initialization_done = false;\n",
        replacement="    horovod_global.shut_down = false;\n"
        "    horovod_global.initialization_done = false;\n"
        "    horovod_global.initialization_failed = false;\n",
        reason="after a failed hvd.init() no other could succeed",
        reference="horovod/common/operations.cc: horovod_shutdown",
    ),
    Edit(
        name="init-error-told",
        path="horovod/common/operations.cc",
        expected="int horovod_is_initialized() {\n",
        replacement="""\
const char* horovod_initialization_error() {
  return horovod_global.initialization_error.c_str();
}

int horovod_is_initialized() {
""",
        reason=_UNCONNECTED,
        reference=_BACKGROUND,
    ),
    Edit(
        name="init-error-raised",
        path="horovod/common/basics.py",
        expected="""\
            raise ValueError(
                "Horovod initialization failed. Please check log messages above for a more """
        """descriptive error.")
""",
        replacement="""\
            describe = self.MPI_LIB_CTYPES.horovod_initialization_error
            describe.restype = ctypes.c_char_p
            reason = describe().decode(errors='replace')
            self.shutdown()  # so that init() may be tried again
            raise ValueError(f"Horovod could not be initialized: {reason}")
""",
        reason=_UNCONNECTED,
        reference="horovod/common/basics.py: init",
    ),
    Edit(
        name="launch-last-words-event",
        path="horovod/runner/gloo_run.py",
        expected="    terminate_all_event = None if settings.elastic else threading.Event()\n",
        replacement="    terminate_all_event = None if settings.elastic else threading.Event()\n"
        "    first_failure = threading.Lock()\n",
        reason=_LAST_WORDS,
        reference="horovod/runner/gloo_run.py: _exec_command_fn",
    ),
    Edit(
        name="launch-last-words",
        path="horovod/runner/gloo_run.py",
        expected="""\
            if not any(ev.is_set() for ev in all_events):
                print('Terminating remaining workers after failure of Process {idx}.'"""
        """.format(idx=index))
            terminate_all_event.set()
""",
        replacement="""\
            if not any(ev.is_set() for ev in all_events) and first_failure.acquire(blocking=False):
                # The others know in a moment that this one is gone, and say what they waited for.
                print('Process {idx} failed; the others are terminated in 5 s, unless they end '
                      'before.'.format(idx=index))
                end = threading.Timer(5, terminate_all_event.set)
                end.daemon = True
                end.start()
""",
        reason=_LAST_WORDS,
        reference="horovod/runner/gloo_run.py: _exec_command_fn",
    ),
    Edit(
        name="launch-ends-grandchildren",
        path="horovod/runner/common/util/safe_shell_exec.py",
        expected="    stdout_fwd.join()\n    stderr_fwd.join()\n",
        replacement="    if middleman.exitcode != 0:\n        _end_group(middleman.pid)\n"
        "    stdout_fwd.join()\n    stderr_fwd.join()\n",
        reason=_ORPHANS,
        reference="horovod/runner/common/util/safe_shell_exec.py: execute",
    ),
    Edit(
        name="launch-ends-group",
        path="horovod/runner/common/util/safe_shell_exec.py",
        expected="def prefix_connection(",
        replacement="""\
def _end_group(group):
    # A worker that failed may leave children behind, and a middleman that was killed its worker.
    # The middleman led a session, so they are all in its process group.
    deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S
    try:
        os.killpg(group, signal.SIGTERM)
        os.killpg(group, signal.SIGCONT)
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def prefix_connection(""",
        reason=_ORPHANS,
        reference="horovod/runner/common/util/safe_shell_exec.py: execute",
    ),
    Edit(
        name="launch-kills-frozen-shell",
        path="horovod/runner/common/util/safe_shell_exec.py",
        expected="    # Kill shell itself.\n    try:\n        p.terminate()\n",
        replacement="    # Kill shell itself.\n    try:\n        p.kill()\n",
        reason="a stopped shell does not act on SIGTERM, and cost 5 s for each worker to kill",
        reference="horovod/runner/common/util/safe_shell_exec.py",
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
