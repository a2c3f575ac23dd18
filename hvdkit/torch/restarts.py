"""Notices that Horovod was initialized anew, as after each change of workers in an elastic job."""

from horovod.torch import mpi_ops

__all__ = ["RestartWatch"]


class RestartWatch:
    """Tells once of each restart. What was agreed on before it, ranks that joined do not know."""

    def __init__(self) -> None:
        self._seen = mpi_ops._handle_map

    def notices(self) -> bool:
        """Whether Horovod was initialized anew since the last call."""
        seen, self._seen = self._seen, mpi_ops._handle_map  # init() makes a new one
        return seen is not self._seen
