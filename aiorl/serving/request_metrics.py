"""Figures of requests and sessions, for Prometheus."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from aiorl.serving.sessions import Session, Sessions
from aiorl.web.app import Request, Response

_BOUNDS = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]
_NAMED = re.compile(r"(?s)\A(/sessions|/v2/models)/.+?(/end|/infer|/ready)?\Z")
"""Paths with names that clients choose."""


class RequestMetrics:
    """Figures of the requests and sessions of an app.

    Attributes:
        registry: registry of all figures.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self.registry = CollectorRegistry()
        seconds = Histogram(
            "aiorl_request_seconds",
            "Time from a request's headers to its answer.",
            ["path", "status"],
            registry=self.registry,
            buckets=_BOUNDS,
        )
        self._expired = Counter(
            "aiorl_sessions_expired", "Sessions ended for lack of requests.", registry=self.registry
        )

        @functools.lru_cache(256)
        def observer(path: str, status: str) -> Callable[[float], None]:
            return seconds.labels(_NAMED.sub(r"\1/*\2", path), status).observe

        self._observer = observer

    def count_sessions(self, sessions: Sessions) -> None:
        """Show the number of open sessions."""
        self.gauge("aiorl_sessions", "Open sessions.", lambda: len(sessions))

    def gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Show a figure that a function returns."""
        Gauge(name, about, registry=self.registry).set_function(value)

    def note_expiry(self, session: Session) -> None:
        """Count a session that has ended for lack of requests."""
        self._expired.inc()

    def note(self, request: Request, status: int, took: float) -> None:
        """Count an answered request."""
        # clients can ask for any path, and each would stay as a time series
        self._observer(request.path if status != 404 else "", str(status))(took)

    def note_message(self, do: str, status: str, took: float) -> None:
        """Count an answered message of a WebSocket."""
        self._observer(f"/ws/{do}", status)(took)

    async def answer(self, request: Request) -> Response:
        """Answer with all figures."""
        return Response(generate_latest(self.registry), 200, CONTENT_TYPE_LATEST.encode())
