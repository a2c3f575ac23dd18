"""The payload of a checkpoint: plain values as JSON, and arrays, in one ``.npz`` file.

Reading one runs no code from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import keras
import ml_dtypes  # noqa: F401 - gives NumPy bfloat16
import numpy as np

from hvdkit.errors import CheckpointError

__all__ = ["decode", "encode", "make_writer", "read_payload"]


def make_writer(state: dict[str, Any], arrays: Sequence[np.ndarray]) -> Callable[[BinaryIO], None]:
    """Return a function that writes the payload into a file, maybe later and in a thread.

    Args:
        state: What JSON can hold; turned into text at once.
        arrays: Those that it refers to, by their places; of any dtype, and not changed any more.
    """
    header = json.dumps(state | {"arrays": [_describe(array) for array in arrays]})

    def write(file: BinaryIO) -> None:
        # Bytes, since NumPy's own files know no bfloat16.
        payload: dict[str, Any] = {f"array{i}": _to_bytes(array) for i, array in enumerate(arrays)}
        np.savez(file, header=np.frombuffer(header.encode(), np.uint8), **payload)

    return write


def read_payload(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return what ``make_writer`` was given; what is no payload raises errors of all kinds."""
    with np.load(path, allow_pickle=False) as payload:
        state = json.loads(payload["header"].tobytes())
        arrays = [
            payload[f"array{i}"].view(np.dtype(dtype)).reshape(shape)
            for i, (dtype, shape) in enumerate(state.pop("arrays"))
        ]
    return state, arrays


def encode(value: Any, name: str, arrays: list[np.ndarray]) -> Any:
    """Turn a value into plain values for JSON that keep tuples, the keys of dicts, and arrays.

    Args:
        value: Numbers, strings, arrays, tensors, and dicts, lists and tuples of them.
        name: Names the value in an error.
        arrays: Copies of the arrays in it are appended; their places stand for them.

    Raises:
        CheckpointError: It holds another object, which only code from the file could bring back.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(item, f"{name}[{i}]", arrays) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {
            "dict": [
                [encode(key, name, arrays), encode(item, f"{name}[{key!r}]", arrays)]
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


def decode(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    """Turn what ``encode`` returned into the value again; tensors come back as arrays."""
    if not isinstance(value, dict):
        return value
    [(kind, held)] = value.items()
    if kind == "array":
        return arrays[held]
    if kind == "dict":
        return {decode(key, arrays): decode(item, arrays) for key, item in held}
    items = [decode(item, arrays) for item in held]
    return tuple(items) if kind == "tuple" else items


def _describe(array: np.ndarray) -> tuple[str, list[int]]:
    return (array.dtype.name if array.dtype.kind == "V" else array.dtype.str), list(array.shape)


def _to_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
