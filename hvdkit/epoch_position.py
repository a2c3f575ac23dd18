"""Where in which epoch training stands, counted over all workers."""

from __future__ import annotations

from hvdkit.errors import HvdkitError
from hvdkit.sharding import count_samples

__all__ = ["EpochPosition"]


class EpochPosition:
    """Counts the samples of an epoch that training has used; at its end the next one begins.

    It holds for any number of workers, which may change at any time.

    Args:
        length: Samples of an epoch.
        seed: Of the order; kept with the position, since it means nothing in another order.
        drop_last: Whether the samples that do not go round are left out.
    """

    def __init__(self, length: int, seed: int = 0, drop_last: bool = False) -> None:
        self.length = length
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0

    def advance(self, samples: int, workers: int) -> None:
        """Count ``samples`` of each of ``workers`` as used.

        Raises:
            HvdkitError: If the number is negative.
        """
        if samples < 0:
            raise HvdkitError(f"training cannot use {samples} samples")
        self.position += samples * workers
        self.settle(workers)

    def settle(self, workers: int) -> None:
        """Begin the next epoch, if nothing is left of this one for so many workers."""
        if self.left(workers) == 0:
            self.epoch, self.position = self.epoch + 1, 0

    def left(self, workers: int) -> int:
        """Return how many samples each of ``workers`` gets until the end of the epoch."""
        return count_samples(self.length, workers, start=self.position, drop_last=self.drop_last)

    def state_dict(self) -> dict[str, int]:
        """Return what ``load_state_dict`` takes; the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "length": self.length,
        }

    def load_state_dict(self, state: dict[str, int], workers: int) -> None:
        """Go on where ``state_dict`` was taken, now with ``workers``.

        Raises:
            HvdkitError: If the state is of data of another length.
        """
        if state["length"] != self.length:
            raise HvdkitError(
                f"the position is one in {state['length']} samples, and here are {self.length}; "
                f"bring the same data, or start the epoch over"
            )
        self.seed = state["seed"]
        self.epoch, self.position = state["epoch"], state["position"]
        self.settle(workers)
