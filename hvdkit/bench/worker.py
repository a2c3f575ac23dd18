"""One rank of one candidate: prepares, then times blocks of steps whenever the driver asks.

Started by ``hvdkit.bench.team`` under horovodrun; not meant to be run by hand.
"""

import argparse
import os
from multiprocessing.connection import Client
from pathlib import Path

from hvdkit.bench import peers, timing
from hvdkit.bench.workloads import WORKLOADS


def main() -> None:
    """Connect to the driver, say what was prepared, and answer until it hangs up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidate", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="holds the driver's socket")
    arguments = parser.parse_args()
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])

    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    workload = WORKLOADS[arguments.model]()
    tensors, parameters = workload.count_parameters()
    trainee, close = peers.prepare(
        arguments.candidate,
        workload.model,
        rank=rank,
        size=size,
        rendezvous=arguments.folder / "rendezvous",
    )
    with Client(str(arguments.folder / "socket"), "AF_UNIX") as connection:
        connection.send(
            {
                "rank": rank,
                "pid": os.getpid(),
                "batch": len(workload.labels),
                "tensors": tensors,
                "parameters": parameters,
                "threads": torch.get_num_threads(),
            }
        )
        try:
            while steps := connection.recv():
                connection.send(timing.time_steps(workload, trainee, steps))
            connection.send(timing.read_peak_rss_bytes())
        except EOFError:
            raise SystemExit("the benchmark's driver went away") from None
    close()


if __name__ == "__main__":
    main()
