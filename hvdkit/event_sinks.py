"""Where events go beside files and logging: TensorBoard and Prometheus.

Neither is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from hvdkit.errors import HvdkitError

__all__ = ["PrometheusEndpoint", "TensorBoard"]


class TensorBoard:
    """TensorBoard, by a writer of PyTorch's kind or of TensorFlow's.

    Args:
        target: A writer, or a directory, for which one is made by whichever framework is loaded.

    Raises:
        HvdkitError: It is neither, no framework is loaded, or TensorBoard is not installed.
    """

    def __init__(self, target: Any) -> None:
        self._own = isinstance(target, str | os.PathLike)
        self._writer = _open_board(os.fspath(target)) if self._own else target
        if not hasattr(self._writer, "add_text") and not hasattr(self._writer, "as_default"):
            raise HvdkitError(
                f"tensorboard must be a directory, a SummaryWriter or a writer of tf.summary, not "
                f"a {type(target).__name__}"
            )
        if not hasattr(self._writer, "add_text"):
            _demand_tensorboard()

    def add_text(self, kind: str, message: str, step: int | None) -> None:
        """Write an event under its kind, at once."""
        if hasattr(self._writer, "add_text"):
            self._writer.add_text(f"hvdkit/{kind}", message, step)
        else:
            with self._writer.as_default():
                _summary().text(f"hvdkit/{kind}", message, step=step or 0)
        self._writer.flush()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a figure."""
        if hasattr(self._writer, "add_scalar"):
            self._writer.add_scalar(f"hvdkit/{name}", value, step)
        else:
            with self._writer.as_default():
                _summary().scalar(f"hvdkit/{name}", value, step=step)

    def close(self) -> None:
        """Close a writer that was made here; one that was given stays open."""
        if self._own:
            self._writer.close()


class PrometheusEndpoint:
    """Counts and figures for Prometheus, over HTTP, in a registry of their own.

    Args:
        port: 0: any free one; ``port`` says which.
        host: The address to listen on.

    Raises:
        HvdkitError: The port cannot be had, or ``prometheus_client`` is not installed.
    """

    def __init__(self, port: int, host: str) -> None:
        try:
            self._client = importlib.import_module("prometheus_client")
        except ImportError:
            raise HvdkitError(
                "prometheus_port needs prometheus_client: pip install '/path/to/hvdkit[health]'"
            ) from None
        self._registry = self._client.CollectorRegistry()
        self._events = self._client.Counter(
            "hvdkit_events", "Events", ["kind", "severity"], registry=self._registry
        )
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(
                port, host, registry=self._registry
            )
        except OSError as error:
            raise HvdkitError(
                f"cannot serve Prometheus on {host}:{port}: {error.strerror or error}; choose "
                "another prometheus_port, or 0 for any that is free"
            ) from None
        self.port = int(self._server.server_port)

    def count(self, kind: str, severity: str) -> None:
        """Count an event."""
        self._events.labels(kind, severity).inc()

    def set(self, rank: int, figures: dict[str, float]) -> None:
        """Set the figures of a rank, by name with the unit as its suffix."""
        for name, value in figures.items():
            if name not in self._gauges:
                self._gauges[name] = self._client.Gauge(
                    f"hvdkit_{name}", name.replace("_", " "), ["rank"], registry=self._registry
                )
            self._gauges[name].labels(rank).set(value)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _open_board(directory: str) -> Any:
    _demand_tensorboard()
    # Not imported by name: this module belongs to all adapters, each of which has one framework.
    if "torch" in sys.modules:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(directory)
    if "tensorflow" in sys.modules:
        return _summary().create_file_writer(directory)
    raise HvdkitError("import torch or tensorflow before an EventLog with a TensorBoard directory")


def _summary() -> Any:
    return sys.modules["tensorflow"].summary


def _demand_tensorboard() -> None:
    try:
        importlib.import_module("tensorboard")
    except ImportError:
        raise HvdkitError(
            "PyTorch and TensorFlow write for TensorBoard by its package, which is not installed: "
            "pip install tensorboard"
        ) from None
