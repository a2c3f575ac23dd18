"""The random state of a process, as plain values that any payload can hold.

Of every library that the process has loaded: Python's ``random``, NumPy's global generator,
PyTorch's of the CPU and of the current CUDA device. Ranks have states of their own, so a
checkpoint holds a list of them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["choose_state", "read_random_state", "seed_generators", "set_random_state"]


def read_random_state() -> dict[str, Any]:
    """Return the state of each generator of this process by the name of its library.

    Dicts, lists, numbers and strings only.
    """
    version, words, gauss = random.getstate()
    packed = struct.pack(f"<{len(words)}I", *words)
    state: dict[str, Any] = {"python": [version, _to_text(packed), gauss]}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = _encode(numpy.random.get_state(legacy=False))
    if torch := sys.modules.get("torch"):
        state["torch"] = _to_text(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = _to_text(torch.cuda.get_rng_state().numpy().tobytes())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators that a state has an entry for, and that this process has loaded."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if "python" in state:
        version, text, gauss = state["python"]
        packed = base64.b64decode(text)
        random.setstate((version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss))
    if "numpy" in state and numpy:
        numpy.random.set_state(_decode(state["numpy"], numpy))
    if "torch" in state and torch:
        torch.set_rng_state(_to_tensor(state["torch"], torch))
    if "cuda" in state and torch and torch.cuda.is_available():
        torch.cuda.set_rng_state(_to_tensor(state["cuda"], torch))


def seed_generators(seeds: dict[str, int]) -> None:
    """Seed generators, by the names that ``read_random_state`` gives them."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if "python" in seeds:
        random.seed(seeds["python"])
    if "numpy" in seeds and numpy:
        numpy.random.seed(seeds["numpy"] % 2**32)
    if "torch" in seeds and torch:
        torch.default_generator.manual_seed(seeds["torch"])
    if "cuda" in seeds and torch and torch.cuda.is_available():
        torch.cuda.manual_seed(seeds["cuda"])


def choose_state(
    states: Sequence[dict[str, Any]], rank: int, size: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what a rank is to restore, and the seeds of what it is to seed anew.

    With as many ranks as saved, each gets its own state back. With another number, a generator
    that was the same on all (of several) is the same again; of the others each rank gets a seed
    of its own, which depends on the saved states, on the rank and on the number of ranks alone.

    Args:
        states: One for each rank that saved.
        rank: Of the ``size`` ranks that restore.
        size: How many ranks restore.
    """
    if len(states) == size:
        return dict(states[rank]), {}
    restored: dict[str, Any] = {}
    seeds: dict[str, int] = {}
    for kind in dict.fromkeys(kind for state in states for kind in state):
        held = [state.get(kind) for state in states]
        if len(held) > 1 and all(value == held[0] for value in held):
            restored[kind] = held[0]
        else:
            text = json.dumps([kind, held, rank, size], sort_keys=True)
            digest = hashlib.sha256(text.encode()).digest()
            seeds[kind] = int.from_bytes(digest[:8], "big") >> 1
    return restored, seeds


def _encode(value: Any) -> Any:
    """Turn a bit generator's state into plain values; arrays become their dtype and bytes."""
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": _to_text(value)}
    return value


def _decode(value: Any, numpy: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "shape", "data"}:
        data = numpy.frombuffer(base64.b64decode(value["data"]), value["dtype"])
        return data.reshape(value["shape"]).copy()
    return {key: _decode(item, numpy) for key, item in value.items()}


def _to_text(data: Any) -> str:
    return base64.b64encode(data if isinstance(data, bytes) else data.tobytes()).decode()


def _to_tensor(text: str, torch: Any) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
