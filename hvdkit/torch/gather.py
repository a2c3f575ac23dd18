"""Bring the ranks' results of one batch together, in the order of the dataset."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, allgather, global_process_set
from torch.utils import _pytree as pytree

from hvdkit.errors import HvdkitError, RankDisagreementError
from hvdkit.torch.collectives import allgather_object
from hvdkit.torch.sampler import ShardedSampler
from hvdkit.torch.transport import pick_wire_device, view_bytes

__all__ = ["gather"]


def gather(
    tensors: Any,
    sampler: ShardedSampler | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate tensors of all ranks along their first dimension.

    With the sampler that the batch came from, rows are in the order of the epoch (that of the
    dataset, if it does not shuffle) and those that only filled up the last step are cut off:
    over an epoch, exactly one row per sample. Call it once per batch then, in order. Without a
    sampler rows follow by rank, and ranks may give different numbers of rows, none included.

    The results carry no gradient. Any dtype, to the last bit; two small collectives a call,
    whatever the number of tensors.

    Collective: every rank of ``process_set`` must call.

    Args:
        tensors: A tensor, or dicts, lists and tuples of tensors of at least one dimension; all
            of the same structure, dtypes and further dimensions on every rank.
        sampler: What ``shard`` returned. Its own process set is used.
        process_set: The ranks to gather from.

    Returns:
        The same structure on every rank.

    Raises:
        RankDisagreementError: On every rank, if structures, dtypes or shapes do not fit
            together, or, with a sampler, batch sizes differ.
        HvdkitError: On every rank, if something is no tensor or has no dimension.
    """
    if sampler is not None:
        process_set = sampler.process_set
    paths, structure = pytree.tree_flatten_with_path(tensors)
    leaves = [leaf for _, leaf in paths]
    labels = [pytree.keystr(path) or "the tensor" for path, _ in paths]
    report = _describe(labels, leaves)
    reports = allgather_object(report, name="gather", process_set=process_set)
    _check(process_set.ranks, reports, same_rows=sampler is not None)
    rows = [[row for _, row in entries] for entries in reports]
    parts = _exchange(leaves, rows, process_set)
    if sampler is None or not leaves:
        return pytree.tree_unflatten([torch.cat(part) for part in parts], structure)
    batch = rows[0][0]
    real = sampler.claim_gathered(batch * process_set.size())
    # Row k of rank r stands at position k * workers + r of the batch.
    merged = [torch.stack(part, dim=1).flatten(0, 1)[:real] for part in parts]
    return pytree.tree_unflatten(merged, structure)


def _describe(labels: list[str], leaves: list[Any]) -> list[tuple[str, int]] | str:
    """List what must be equal of each leaf, and its rows; or say what is wrong with one."""
    entries = []
    for label, leaf in zip(labels, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return f"{label} is no dense tensor but a {type(leaf).__name__}"
        if leaf.dim() == 0:
            return f"{label} has no dimension to gather along; use average_metrics for numbers"
        kind = pick_wire_device(leaf.device).type
        entries.append((f"{label}: {leaf.dtype} (*, {_join(leaf.shape[1:])}) by {kind}", len(leaf)))
    return entries


def _join(shape: torch.Size) -> str:
    return ", ".join(str(size) for size in shape)


def _check(ranks: list[int], reports: list[Any], same_rows: bool) -> None:
    for rank, report in zip(ranks, reports, strict=True):
        if isinstance(report, str):
            raise HvdkitError(f"gather: rank {rank}: {report}")
    first = reports[0]
    for rank, report in zip(ranks, reports, strict=True):
        for mine, theirs in zip(first, report, strict=False):
            if mine[0] != theirs[0]:
                raise RankDisagreementError(
                    f"gather: rank {ranks[0]} has {mine[0]}, rank {rank} has {theirs[0]}"
                )
        if len(first) != len(report):
            raise RankDisagreementError(
                f"gather: rank {ranks[0]} has {len(first)} tensors, rank {rank} has {len(report)}"
            )
        sizes = {rows for _, rows in [*first, *report]}
        if same_rows and len(sizes) > 1:
            raise RankDisagreementError(
                f"gather: with a sampler all tensors of a batch have the same number of rows on "
                f"every rank, but ranks {ranks[0]} and {rank} have {sorted(sizes)}"
            )


def _exchange(
    leaves: list[torch.Tensor], rows: list[list[int]], process_set: ProcessSet
) -> list[list[torch.Tensor]]:
    """Return, for each leaf, the tensor of every rank."""
    parts: list[list[torch.Tensor]] = [[] for _ in leaves]
    by_kind: dict[str, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_kind.setdefault(pick_wire_device(leaf.device).type, []).append(index)
    for kind, indices in by_kind.items():
        device = pick_wire_device(leaves[indices[0]].device)
        sent = torch.cat([view_bytes(leaves[i]).to(device) for i in indices])
        received = allgather(sent, name=f"hvdkit.gather.{kind}", process_set=process_set)
        start = 0
        for rank_rows in rows:
            for index in indices:
                leaf = leaves[index]
                shape = (rank_rows[index], *leaf.shape[1:])
                size = torch.Size(shape).numel() * leaf.element_size()
                # A copy of its own begins at an address that suits every dtype.
                data = received[start : start + size].clone().to(leaf.device)
                parts[index].append(data.view(leaf.dtype).view(shape))
                start += size
    return parts
