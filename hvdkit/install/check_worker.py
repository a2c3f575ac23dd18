"""Run under horovodrun: checks the collectives of one framework by arithmetic.

Each rank computes from its rank and the size what every operation must return, and writes one
line of JSON a check to standard output; :mod:`hvdkit.install.prove` reads them. This is the
only module of the installer that imports a framework, and only as a worker.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

__all__ = ["MARK"]

MARK = "HVDKIT-CHECK "
SUM_DTYPES = ("float16", "float32", "float64", "int32", "int64")


class Collectives:
    """The collectives of one framework on NumPy arrays."""

    def __init__(self, framework: str) -> None:
        self.hvd = import_module(f"horovod.{framework}")
        self.hvd.init()
        self.rank: int = self.hvd.rank()
        self.size: int = self.hvd.size()
        if framework == "torch":
            self.to_tensor = import_module("torch").from_numpy
        else:
            self.to_tensor = import_module("tensorflow").constant

    def call(self, name: str, array: Any, **options: Any) -> Any:
        """Run a collective; a list of arrays gives a list. Collective: every rank must call."""
        many = isinstance(array, list)
        tensor = [self.to_tensor(a) for a in array] if many else self.to_tensor(array)
        result = getattr(self.hvd, name)(tensor, **options)
        if name == "alltoall" and isinstance(result, tuple):
            result = result[0]
        return [r.numpy() for r in result] if many else result.numpy()


def check_sum(c: Collectives, dtype: str) -> None:
    """Sum: rank r contributes r, 1 + r, 2 + r ..."""
    np = import_module("numpy")
    ramp = np.arange(17)
    found = c.call("allreduce", (ramp + c.rank).astype(dtype), op=c.hvd.Sum)
    expect(found, (c.size * ramp + c.size * (c.size - 1) // 2).astype(dtype))


def check_average(c: Collectives) -> None:
    """Average: rank r contributes r in a tensor larger than a network buffer."""
    np = import_module("numpy")
    found = c.call("allreduce", np.full(300_000, c.rank, "float32"), op=c.hvd.Average)
    expect(found, np.full(300_000, (c.size - 1) / 2, "float32"))


def check_extremes(c: Collectives) -> None:
    """Min and Max over the ranks."""
    np = import_module("numpy")
    mine = np.array([c.rank, -c.rank], "float32")
    expect(c.call("allreduce", mine, op=c.hvd.Max), np.array([c.size - 1, 0], "float32"))
    expect(c.call("allreduce", mine, op=c.hvd.Min), np.array([0, 1 - c.size], "float32"))


def check_grouped(c: Collectives) -> None:
    """Three tensors of other shapes in one group."""
    np = import_module("numpy")
    arrays = [np.full((n, 2), n * (c.rank + 1), "float32") for n in (1, 2, 3)]
    total = c.size * (c.size + 1) // 2
    for n, found in enumerate(c.call("grouped_allreduce", arrays, op=c.hvd.Sum), start=1):
        expect(found, np.full((n, 2), n * total, "float32"))


def check_allgather(c: Collectives) -> None:
    """Rank r gives r + 1 rows that hold r."""
    np = import_module("numpy")
    found = c.call("allgather", np.full((c.rank + 1, 2), c.rank, "int64"))
    rows = [rank for rank in range(c.size) for _ in range(rank + 1)]
    expect(found, np.array([[rank, rank] for rank in rows], "int64"))


def check_broadcast(c: Collectives) -> None:
    """Every rank is the root once."""
    np = import_module("numpy")
    for root in range(c.size):
        found = c.call("broadcast", np.full(5, c.rank + 10, "float64"), root_rank=root)
        expect(found, np.full(5, root + 10, "float64"))


def check_alltoall(c: Collectives) -> None:
    """Rank r sends k + 1 elements of the value r * size + k to rank k."""
    np = import_module("numpy")
    ranks = range(c.size)
    mine = [c.rank * c.size + k for k in ranks for _ in range(k + 1)]
    splits = c.to_tensor(np.arange(1, c.size + 1, dtype="int32"))
    found = c.call("alltoall", np.array(mine, "int32"), splits=splits)
    expected = [r * c.size + c.rank for r in ranks for _ in range(c.rank + 1)]
    expect(found, np.array(expected, "int32"))


def check_reducescatter(c: Collectives) -> None:
    """2 * size + 1 rows: rank 0 keeps three of the sums, every other rank two."""
    np = import_module("numpy")
    rows = np.arange(2 * c.size + 1, dtype="float32")
    found = c.call("reducescatter", np.stack([rows, rows + c.rank], axis=1), op=c.hvd.Sum)
    total = np.stack([c.size * rows, c.size * rows + c.size * (c.size - 1) / 2], axis=1)
    first = 0 if c.rank == 0 else 2 * c.rank + 1
    expect(found, total[first : 2 * c.rank + 3])


def expect(found: Any, expected: Any) -> None:
    """Compare exactly: every value here is a small number that each dtype holds exactly.

    Raises:
        AssertionError: Shape, dtype or a value differs; says how.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise AssertionError(
            f"got {found.dtype}{found.shape}, expected {expected.dtype}{expected.shape}"
        )
    if not (found == expected).all():
        raise AssertionError(f"got {found.ravel()[:8]}, expected {expected.ravel()[:8]}")


CHECKS: dict[str, Callable[[Collectives], None]] = {
    **{f"allreduce sum {dtype}": partial(check_sum, dtype=dtype) for dtype in SUM_DTYPES},
    "allreduce average": check_average,
    "allreduce min max": check_extremes,
    "grouped allreduce": check_grouped,
    "allgather": check_allgather,
    "broadcast": check_broadcast,
    "alltoall": check_alltoall,
    "reducescatter": check_reducescatter,
}


def main() -> int:
    """Run every check; return the number of failures on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=("torch", "tensorflow"))
    parser.add_argument("--size", type=int, required=True)
    arguments = parser.parse_args()
    collectives = Collectives(arguments.framework)
    rank = collectives.rank
    failures = 0

    def report(name: str, error: str) -> None:
        line = json.dumps({"rank": rank, "check": name, "error": error})
        # One write a line: lines of several ranks may share a pipe.
        os.write(1, f"{MARK}{line}\n".encode())

    if collectives.size != arguments.size:
        # Two worlds of one, each content with itself, are the usual sign of a wrong launcher.
        report("world size", f"got {collectives.size}, expected {arguments.size}")
        return 1
    report("world size", "")
    for name, check in CHECKS.items():
        error = ""
        try:
            check(collectives)
        except Exception as problem:  # a worker reports whatever went wrong and goes on
            error = f"{type(problem).__name__}: {problem}"[:500]
            failures += 1
        report(name, error)
    collectives.hvd.shutdown()
    return failures


if __name__ == "__main__":
    raise SystemExit(min(main(), 100))
