"""The workers of one candidate, which run only when it is their turn.

Every candidate has processes of its own, because threads of another one in the same process
(Horovod's wakes a thousand times a second) would be timed with it. All stay alive for the
whole measurement, so that rounds can alternate quickly; those not in turn are suspended.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from hvdkit.errors import HvdkitError

__all__ = ["Team"]

# A turn that takes longer hangs.
ANSWER_S = 1800


class Post(Protocol):
    """How messages reach a team's keepers and their answers come back."""

    def send(self, keeper: int, message: dict[str, Any]) -> None:
        """Send a message to one keeper."""

    def receive(self, team: int, keepers: list[int], deadline_s: float) -> tuple[int, Any]:
        """Return the keeper and the answer that comes next for ``team`` from one of ``keepers``."""

    def forget(self, team: int) -> None:
        """Take no further interest in a team."""


class Team:
    """``size`` workers that answer requests when it is their turn.

    Attributes:
        size: Number of workers.
        hello: What each worker said when it was ready, in the order of the ranks.
    """

    def __init__(self, post: Post, number: int, title: str, size: int) -> None:
        """Made by ``Crew.start``."""
        self.size = size
        self.hello: list[dict[str, Any]] = []
        self._post = post
        self._number = number
        self._title = title

    def wait_until_ready(self, deadline_s: float) -> None:
        """Block until every worker is ready to answer, then suspend them.

        Raises:
            HvdkitError: a worker died, or it took longer than ``deadline_s`` seconds.
        """
        self.hello = self._gather(deadline_s, "was not ready")
        self._tell_all({"do": "pause"})

    def ask(self, request: Any) -> list[Any]:
        """Let the workers answer ``request``; return the answers in the order of the ranks.

        Raises:
            HvdkitError: a worker died, or did not answer in half an hour.
        """
        self._tell_all({"do": "ask", "request": request})
        answers = self._gather(ANSWER_S, "did not answer")
        self._tell_all({"do": "pause"})
        return answers

    def finish(self) -> list[int]:
        """Return each worker's peak resident size in bytes, and let the workers end."""
        self._tell_all({"do": "ask", "request": None})
        peaks = self._gather(ANSWER_S, "did not end")
        self._post.forget(self._number)
        self._tell_all({"do": "end"})
        return peaks

    def _tell_all(self, message: dict[str, Any]) -> None:
        for keeper in range(self.size):
            self._post.send(keeper, {"team": self._number, **message})

    def _gather(self, patience_s: float, failure: str) -> list[Any]:
        """Return one answer of each worker."""
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + patience_s
        while len(answers) < self.size:
            missing = [rank for rank in range(self.size) if rank not in answers]
            try:
                rank, answer = self._post.receive(self._number, missing, deadline_s)
            except TimeoutError:
                ranks = ", ".join(map(str, missing))
                raise HvdkitError(
                    f"{self._title} {failure} after {patience_s:.0f} s (waited for rank {ranks})"
                ) from None
            answers[rank] = answer
        return [answers[rank] for rank in range(self.size)]
