"""Edits that tell operations why they end: their error names the ranks that are missing.

Those that wait when a rank is lost are told, those that fail with it, and those that come later.
"""

from hvdkit.install.edits import Edit

__all__ = ["TOLD"]

_NAMED = "the error of the other ranks did not say which rank was missing, nor for what they waited"
_OPERATIONS = "horovod/common/operations.cc"

TOLD = (
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
)
