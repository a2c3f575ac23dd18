"""A benchmark's worker: one rank of one candidate, which answers what its driver asks.

``hvdkit.bench.team`` starts them under horovodrun; not meant to be run by hand.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from hvdkit.bench.timing import read_peak_rss_bytes

__all__ = ["make_parser", "read_rank", "serve"]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows what every worker is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--candidate", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="holds the driver's socket")
    return parser


def read_rank() -> tuple[int, int]:
    """Return this worker's rank and the number of workers, as horovodrun set them."""
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


def serve(folder: Path, hello: Mapping[str, Any], answer: Callable[[Any], Any]) -> None:
    """Connect to the driver, say what was prepared, and answer until it has no more requests.

    Args:
        folder: Holds the driver's socket.
        hello: What the driver wants to know beside rank and process.
        answer: Called with each request, on all ranks in the same order.
    """
    rank, _ = read_rank()
    with Client(str(folder / "socket"), "AF_UNIX") as connection:
        connection.send({"rank": rank, "pid": os.getpid(), **hello})
        try:
            while (request := connection.recv()) is not None:
                connection.send(answer(request))
            connection.send(read_peak_rss_bytes())
        except EOFError:
            raise SystemExit("the benchmark's driver went away") from None
