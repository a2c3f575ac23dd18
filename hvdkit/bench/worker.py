"""One rank of one candidate: prepares, then times blocks of steps whenever the driver asks.

Started by ``hvdkit.bench.team`` under horovodrun; not meant to be run by hand.
"""

import argparse
import os
from multiprocessing.connection import Client
from pathlib import Path

from hvdkit.bench.catalog import prepare
from hvdkit.bench.timing import read_peak_rss_bytes


def main() -> None:
    """Connect to the driver, say what was prepared, and answer until it hangs up."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("framework", "candidate", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="holds the driver's socket")
    arguments = parser.parse_args()
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    training = prepare(
        arguments.framework,
        arguments.candidate,
        arguments.model,
        rank=rank,
        size=size,
        threads=arguments.threads,
        folder=arguments.folder,
    )
    with Client(str(arguments.folder / "socket"), "AF_UNIX") as connection:
        connection.send(
            {
                "rank": rank,
                "pid": os.getpid(),
                "batch": training.batch,
                "tensors": training.tensors,
                "parameters": training.parameters,
                "threads": arguments.threads,
            }
        )
        try:
            while steps := connection.recv():
                connection.send(training.run(steps))
            connection.send(read_peak_rss_bytes())
        except EOFError:
            raise SystemExit("the benchmark's driver went away") from None
    training.close()


if __name__ == "__main__":
    main()
