"""Events of a training run: a gradient that is not finite, a slow rank, a rollback, and the like.

Every event goes to Python logging (logger ``hvdkit``); to a file of JSON lines, to TensorBoard and
to a Prometheus endpoint where asked for. What fails while training runs (a full disk) is logged
once and never ends the training.

Kinds that hvdkit emits: ``nonfinite``, ``loss_spike``, ``straggler``, ``memory_growth``,
``replica_mismatch`` and ``rollback``.
"""

from __future__ import annotations

import json
import logging
import math
import os
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdkit import env
from hvdkit.errors import HvdkitError
from hvdkit.event_sinks import PrometheusEndpoint, TensorBoard

__all__ = ["EventLog"]

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_logger = logging.getLogger("hvdkit")


class EventLog:
    """Where events go; without arguments to Python logging alone.

    Every rank makes one with the same arguments. Each writes a file of its own, so that no two
    processes share one: rank 0 the one named, rank 3 ``events.rank3.jsonl`` beside
    ``events.jsonl``. TensorBoard and Prometheus are rank 0's, which has the figures of all ranks.

    A line of the file is an object with ``time`` (UTC, ISO 8601), ``kind``, ``severity``, ``step``,
    ``rank``, ``message`` and ``details``; numbers that are not finite are texts in it, as JSON
    demands.

    Args:
        path: The file, appended to, each line at once; None: no file.
        tensorboard: A writer of yours (one of ``torch.utils.tensorboard`` or of ``tf.summary``),
            or a directory to write into by whichever of the two frameworks is loaded.
        prometheus_port: Where to serve figures and counts of events over HTTP; 0: any free port,
            see the attribute of this name. None: no endpoint.
        prometheus_host: The address to listen on; by default this machine alone can connect.

    Raises:
        HvdkitError: The file cannot be written, the port cannot be had, or a package is missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tensorboard: Any = None,
        prometheus_port: int | None = None,
        prometheus_host: str = "127.0.0.1",
    ) -> None:
        self.path: Path | None = None
        self.prometheus_port: int | None = None
        self._file: int | None = None
        self._board: TensorBoard | None = None
        self._endpoint: PrometheusEndpoint | None = None
        self._failed: set[str] = set()
        rank = 0 if env.launcher() is None else env.rank()
        if path is not None:
            self.path = _name_for_rank(Path(path), rank)
            self._file = _open_to_append(self.path)
        try:
            if tensorboard is not None and rank == 0:
                self._board = TensorBoard(tensorboard)
            if prometheus_port is not None and rank == 0:
                self._endpoint = PrometheusEndpoint(prometheus_port, prometheus_host)
                self.prometheus_port = self._endpoint.port
        except BaseException:
            self.close()
            raise

    def emit(
        self,
        kind: str,
        message: str,
        *,
        severity: str = "warning",
        step: int | None = None,
        rank: int | None = None,
        **details: Any,
    ) -> None:
        """Send one event to all sinks.

        Args:
            kind: What happened, in one word; see the module.
            message: For people: what was found, and what was done.
            severity: ``info``, ``warning`` or ``error``.
            step: The training step, if known.
            rank: The rank that it is about; None where it is about all.
            details: Numbers and texts for programs.

        Raises:
            ValueError: The severity is none of the three.
        """
        if severity not in _LEVELS:
            raise ValueError(f"severity must be one of {', '.join(_LEVELS)}, not {severity!r}")
        where = "" if step is None else f"step {step}: "
        _logger.log(_LEVELS[severity], "%s: %s%s", kind, where, message)
        if self._file is not None:
            line = {
                "time": datetime.now(timezone.utc).isoformat(),
                "kind": kind,
                "severity": severity,
                "step": step,
                "rank": rank,
                "message": message,
                "details": details,
            }
            text = json.dumps(_make_plain(line), allow_nan=False) + "\n"
            # In one piece: lines stay whole even where an elastic job gives a rank's number away.
            self._try("the event file", os.write, self._file, text.encode())
        if self._board is not None:
            self._try("TensorBoard", self._board.add_text, kind, message, step)
        if self._endpoint is not None:
            self._try("Prometheus", self._endpoint.count, kind, severity)

    def record(self, step: int, rank: int, figures: dict[str, float]) -> None:
        """Send figures of one rank to TensorBoard and Prometheus.

        Args:
            step: The training step.
            rank: The rank that they are of.
            figures: By name, with the unit as its suffix, such as ``step_time_seconds``.
        """
        if self._board is not None:
            for name, value in figures.items():
                self._try("TensorBoard", self._board.add_scalar, f"{name}/{rank}", value, step)
        if self._endpoint is not None:
            self._try("Prometheus", self._endpoint.set, rank, figures)

    def close(self) -> None:
        """Close the file and the endpoint; a writer of yours stays open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _try(self, sink: str, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            if sink not in self._failed:
                self._failed.add(sink)
                _logger.warning("events no longer reach %s: %s", sink, error)


def _name_for_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _open_to_append(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise HvdkitError(f"cannot write events to {path}: {error.strerror}") from None


def _make_plain(value: Any) -> Any:
    """Return what JSON can hold: numbers that are not finite, and other objects, as texts."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return str(value)
