"""Checkpoints of a Keras training run: saved on rank 0, restored everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import keras
import ml_dtypes  # noqa: F401 - gives NumPy bfloat16
import numpy as np

from hvdkit import agreement, checkpoint
from hvdkit.errors import CheckpointError
from hvdkit.keras.backend import hvd
from hvdkit.keras.collectives import allgather_object, gather_over
from hvdkit.keras.state import (
    broadcast_initial_state,
    describe_variable,
    name_slots,
    name_variables,
    read_variable,
)

__all__ = ["CheckpointStore", "restore_or_broadcast"]


class CheckpointStore(checkpoint.CheckpointStore):
    """A directory of checkpoints that survives a crash while saving.

    ::

        store = hvd.CheckpointStore("checkpoints")
        restored = hvd.restore_or_broadcast(store, model, optimizer)
        first = restored["step"] if restored else 0
        ...
        store.save(step, model, optimizer, epoch=epoch)

    Args:
        directory: Only rank 0 needs to see it, unless another rank restores.
        keep: How many of the newest checkpoints to keep; None keeps all.
    """

    def save(
        self, step: int, model: Any = None, optimizer: Any = None, **extra: Any
    ) -> Path | None:
        """Save on rank 0; every other rank returns at once.

        Any rank may call it or not; it is no collective. Batch-norm statistics are rank 0's:
        call ``average_buffers`` before to save those of all ranks. So are gradients that have been
        accumulated but not applied: save after an update.

        Args:
            step: Training steps done.
            model: Its variables are saved, seeds included.
            optimizer: Its variables are saved, plain or distributed alike.
            extra: Numbers, strings, arrays, tensors, and dicts, lists and tuples of them.

        Returns:
            The path of the payload on rank 0, None elsewhere.

        Raises:
            CheckpointError: On rank 0, if it cannot be written, or holds an object that could
                not be loaded again without running code from the file.
        """
        if hvd.rank() != 0:
            return None
        arrays: list[np.ndarray] = []
        state = {
            "step": step,
            "model": None if model is None else _encode_variables("model", model, arrays),
            "optimizer": (
                None if optimizer is None else _encode_variables("optimizer", optimizer, arrays)
            ),
            "extra": [[name, _encode(value, name, arrays)] for name, value in extra.items()],
        }
        header = json.dumps(state | {"arrays": [_describe(array) for array in arrays]})

        def write(file: BinaryIO) -> None:
            # Bytes, since NumPy's own files know no bfloat16.
            payload: dict[str, Any] = {
                f"array{i}": _to_bytes(array) for i, array in enumerate(arrays)
            }
            np.savez(file, header=np.frombuffer(header.encode(), np.uint8), **payload)

        return self.write(step, write)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Load the newest whole checkpoint, or that of a step, on the rank that calls.

        Args:
            step: None for the newest.

        Returns:
            ``{"step", "model", "optimizer", "extra"}``, model and optimizer as lists of (name,
            dtype and shape, array); None when the store is empty.

        Raises:
            CheckpointError: If there are checkpoints but none can be used, or none of ``step``.
        """
        found = self.latest() if step is None else self.find(step)
        if found is None:
            return None
        try:
            with np.load(found.path, allow_pickle=False) as payload:
                state = json.loads(payload["header"].tobytes())
                arrays = [
                    payload[f"array{i}"].view(np.dtype(dtype)).reshape(shape)
                    for i, (dtype, shape) in enumerate(state.pop("arrays"))
                ]
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"{found.path} is no checkpoint of hvdkit.keras: {error}"
            ) from error
        for part in ("model", "optimizer"):
            if state[part] is not None:
                state[part] = [(name, kind, arrays[i]) for name, kind, i in state[part]]
        state["extra"] = {name: _decode(value, arrays) for name, value in state["extra"]}
        return dict(state)


def restore_or_broadcast(
    store: CheckpointStore,
    model: Any,
    optimizer: Any = None,
    root_rank: int = 0,
    process_set: Any = hvd.global_process_set,
) -> dict[str, Any] | None:
    """Start every rank from the newest checkpoint, or from the root's initial state.

    The root reads the store; model, optimizer and the rest then go to all ranks as
    ``broadcast_initial_state`` sends them.

    Collective: every rank of ``process_set`` must call.

    Args:
        store: Read on the root only.
        model: Gets the saved state, or the root's.
        optimizer: Likewise; by default the one that the model was compiled with, if any.
        root_rank: The global rank that reads and sends.
        process_set: The ranks to send to.

    Returns:
        What ``save`` was given as extra, and ``"step"``; None when the store is empty.

    Raises:
        CheckpointError: On the root, if no checkpoint can be used; the other ranks raise
            RankDisagreementError at the same time, which quotes it.
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    extra: dict[str, Any] | None = None
    with agreement.share_errors(
        "restore_or_broadcast", gather=gather_over(process_set), ranks=process_set.ranks
    ):
        if hvd.rank() == root_rank:
            extra = _restore(store, model, optimizer)
    broadcast_initial_state(model, optimizer, root_rank, process_set)
    everyones = allgather_object(extra, name="restore_or_broadcast", process_set=process_set)
    return everyones[list(process_set.ranks).index(root_rank)]


def _restore(store: CheckpointStore, model: Any, optimizer: Any) -> dict[str, Any] | None:
    saved = store.load()
    if saved is None:
        return None
    targets = [("model", model)] + ([] if optimizer is None else [("optimizer", optimizer)])
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    assignments = []
    for part, target in targets:
        if saved[part] is None:
            raise CheckpointError(
                f"the checkpoint of step {saved['step']} was saved without the {part}; pass "
                f"{part}= to save"
            )
        entries = [(name, describe_variable(v)) for name, v in _name(part, target)]
        kinds = [(name, kind) for name, kind, _ in saved[part]]
        for theirs, ours in zip(
            kinds + [None] * (len(entries) - len(kinds)),
            entries + [None] * (len(kinds) - len(entries)),
            strict=True,
        ):
            if theirs != ours:
                raise CheckpointError(
                    f"the checkpoint of step {saved['step']} does not fit this {part}: it holds "
                    f"{theirs}, where there is {ours}"
                )
        assignments += [
            (v, array) for v, (_, _, array) in zip(target.variables, saved[part], strict=True)
        ]
    # All fit: nothing is left half restored.
    for variable, array in assignments:
        variable.assign(array)
    return {**saved["extra"], "step": saved["step"]}


def _name(part: str, target: Any) -> list[tuple[str, Any]]:
    return (name_slots if part == "optimizer" else name_variables)(target.variables)


def _encode_variables(part: str, target: Any, arrays: list[np.ndarray]) -> list[Any]:
    entries = []
    for name, variable in _name(part, target):
        # A copy: training may go on, and TensorFlow shares its memory.
        arrays.append(read_variable(variable).copy())
        entries.append([name, describe_variable(variable), len(arrays) - 1])
    return entries


def _encode(value: Any, name: str, arrays: list[np.ndarray]) -> Any:
    """Turn a value into JSON that keeps tuples, the keys of dicts, and arrays."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, f"{name}[{i}]", arrays) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {
            "dict": [
                [_encode(key, name, arrays), _encode(item, f"{name}[{key!r}]", arrays)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        arrays.append(np.array(value, order="C"))
        return {"array": len(arrays) - 1}
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which could not be "
        "loaded without running code; save numbers, strings, arrays, dicts, lists and tuples"
    )


def _decode(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind == "array":
        return arrays[held]
    if kind == "dict":
        return {_decode(key, arrays): _decode(item, arrays) for key, item in held}
    items = [_decode(item, arrays) for item in held]
    return tuple(items) if kind == "tuple" else items


def _describe(array: np.ndarray) -> tuple[str, list[int]]:
    return (array.dtype.name if array.dtype.kind == "V" else array.dtype.str), list(array.shape)


def _to_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
