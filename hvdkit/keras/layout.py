"""What gradients look like, and that they look alike on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvdkit import agreement
from hvdkit.env import is_elastic
from hvdkit.keras.agreement import demand_equal_entries
from hvdkit.keras.backend import is_sparse, is_tensorflow

__all__ = [
    "Gradient",
    "agree_on_layout",
    "describe_gradients",
    "list_versions",
    "outside_of_functions",
]

_BYTES = {"complex128": 16, "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4}

# What ranks have agreed on, by process set; as many on each rank, so the count names the next.
_agreed: dict[int, set[Hashable]] = {}


@dataclass(frozen=True)
class Gradient:
    """The kind of one gradient.

    Attributes:
        dtype: Keras's name of it.
        shape: None where it is known only when the gradient is there.
        sparse: Whether it is ``IndexedSlices``; the shape is then the variable's.
    """

    dtype: str
    shape: tuple[int, ...] | None
    sparse: bool

    @property
    def count(self) -> int:
        """Elements of a dense gradient of known shape."""
        count = 1
        for length in self.shape or ():
            count *= length
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of a dense gradient of known shape."""
        return self.count * _BYTES.get(self.dtype, 2)

    def __str__(self) -> str:
        """Format for a message, as ``float32 [3, 2]``."""
        shape = "of unknown shape" if self.shape is None else str(list(self.shape))
        return f"{'sparse ' if self.sparse else ''}{self.dtype} {shape}"


def describe_gradients(gradients: Sequence[Any]) -> tuple[Gradient, ...]:
    """Return the kind of each gradient, as far as it is known while a function is traced."""
    return tuple(
        Gradient(
            keras.backend.standardize_dtype(gradient.dtype), _shape(gradient), is_sparse(gradient)
        )
        for gradient in gradients
    )


def agree_on_layout(
    layout: Sequence[Gradient], options: Sequence[tuple[str, str]], process_set: Any
) -> None:
    """Raise on every rank unless all are about to reduce the same.

    Ranks talk about each layout once, when they first meet it: inside of ``tf.function`` while
    it is traced. In an elastic job, where who joins meets it later than the others, and in a
    graph of ``tf.compat.v1``, which runs later, they do not.

    Collective: every rank of ``process_set`` must call.

    Args:
        layout: What is reduced.
        options: How it is reduced.
        process_set: The ranks to compare.

    Raises:
        RankDisagreementError: Names the first gradient or option that differs.
    """
    agreed = _agreed.setdefault(process_set.process_set_id, set())
    key = (tuple(layout), tuple(options))
    if key in agreed or is_elastic():
        return
    with outside_of_functions() as possible:
        if possible:
            demand_equal_entries(
                "What is reduced",
                [
                    *list_versions(),
                    *options,
                    *((f"gradient {i}", str(one)) for i, one in enumerate(layout)),
                ],
                name=f"gradients{len(agreed)}.agreement",
                process_set=process_set,
            )
            agreed.add(key)


def list_versions() -> list[tuple[str, str]]:
    """List the versions that must be the same on every rank, as labels and texts."""
    if is_tensorflow():
        import tensorflow as tf

        backend = {"TensorFlow": tf.__version__}
    else:
        import torch

        backend = {"PyTorch": torch.__version__}
    return agreement.describe_versions({**backend, "Keras": keras.__version__})


@contextlib.contextmanager
def outside_of_functions() -> Any:
    """Run what is inside now, not when a function that is traced runs; False: not possible."""
    if not is_tensorflow():
        yield True
        return
    import tensorflow as tf

    with tf.init_scope():
        yield tf.executing_eagerly()


def _shape(gradient: Any) -> tuple[int, ...] | None:
    if is_tensorflow() and not gradient.shape.is_fully_defined():
        return None
    return tuple(int(length) for length in gradient.shape)
