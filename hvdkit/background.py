"""Work in a thread, one piece at a time, that is neither cut off at exit nor fails unseen."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["BackgroundWork"]

logger = logging.getLogger("hvdkit")


class BackgroundWork:
    """Runs functions one after another, each in a thread that the interpreter waits for at exit."""

    def __init__(self) -> None:
        self._starting = threading.RLock()  # a signal handler may save while saving starts
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, function: Callable[[], object]) -> None:
        """Run a function beside the caller; first waits for the one before.

        Its error is logged at once and raised by the next ``start`` or ``wait``.
        """
        with self._starting:
            self.wait()
            thread = threading.Thread(target=self._run, args=(function,), name="hvdkit-background")
            thread.start()
            self._thread = thread

    def settle(self) -> None:
        """Wait until nothing runs; an error stays for ``wait``."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wait(self) -> None:
        """Wait until nothing runs, and raise the error of what ran, once."""
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error
            logger.error("%s", error)
