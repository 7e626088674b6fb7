"""Counts and durations of HTTP requests for Prometheus, and access lines of requests that are refused here.

Names and labels of the metrics are those of prometheus-fastapi-instrumentator, which vLLM uses, so that
dashboards made for it work. The label `code` with the exact status is an addition. The engine writes the
access line of a request that reaches it; all other POST requests that fail get theirs here. The middleware
runs on the event loop; the page is made on any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from inflight.access_log import AccessLog
from inflight.core.report.metrics import Histogram, HistogramSnapshot
from inflight.openai.request_ids import passage_of
from inflight.serving.metrics_page import histogram_lines

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the durations' buckets, in seconds."""

_NOT_COUNTED = frozenset({"/metrics", "/health"})
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_OTHER = "none"
_CLIENT_GONE = 499
"""The status of a request whose client has gone before the answer began, as nginx has it."""


class HttpMetrics:
    """Numbers of HTTP requests and histograms of their durations. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._durations: dict[tuple[str, str], Histogram] = {}
        self._all = Histogram(BOUNDS)

    def observe(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a request whose answer has ended.

        Args:
            handler: The route, such as /v1/completions.
            method: The HTTP method.
            status: The HTTP status.
            seconds: From the request's arrival to the end of its answer.
        """
        with self._lock:
            self._requests[handler, method, status] += 1
            self._durations.setdefault((handler, method), Histogram(BOUNDS)).observe(seconds)
            self._all.observe(seconds)

    def page(self) -> str:
        """Return the metrics in Prometheus' text format."""
        with self._lock:
            requests = sorted(self._requests.items())
            durations = {
                f'handler="{handler}",method="{method}"': histogram.snapshot()
                for (handler, method), histogram in sorted(self._durations.items())
            }
            total = self._all.snapshot()
        counts = [
            f'http_requests_total{{handler="{handler}",method="{method}",status="{status // 100}xx",'
            f'code="{status}"}} {count}'
            for (handler, method, status), count in requests
        ]
        lines = [
            "# HELP http_requests_total HTTP requests by route, method and status",
            "# TYPE http_requests_total counter",
            *counts,
            *_durations("http_request_duration_seconds", "Durations by route and method", durations),
            *_durations("http_request_duration_highr_seconds", "Durations of all requests", {"": total}),
        ]
        return "".join(f"{line}\n" for line in lines)


def _durations(name: str, help: str, snapshots: dict[str, HistogramSnapshot]) -> Iterator[str]:
    return histogram_lines(name, f"{help}, from arrival to the end of the answer", snapshots, bound_text=str)


class HttpObserver:
    """Middleware, outside of all others, that counts each request when its answer has ended.

    Args:
        app: The application that gets the requests.
        paths: The paths of all routes.
        metrics: The counts.
        access_log: The log of requests that fail before they reach the engine.
    """

    def __init__(
        self, app: ASGIApp, paths: frozenset[str], metrics: HttpMetrics, access_log: AccessLog
    ) -> None:
        self._app = app
        self._paths = paths
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to the application, then count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s, status = time.monotonic(), _CLIENT_GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._ended(scope, status, time.monotonic() - begun_s)

    def _ended(self, scope: Scope, status: int, seconds: float) -> None:
        passage = passage_of(scope)
        handler = self._handler(scope)
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        if handler not in _NOT_COUNTED:
            self._metrics.observe(handler, method, status, seconds)
        if method == "POST" and status >= 400 and not passage.reaches_engine:
            self._access_log.refuse(passage.origin, status=status, path=handler)

    def _handler(self, scope: Scope) -> str:
        """Return the route of a request: no text of clients, which could be any number."""
        if scope["path"] in self._paths:  # also of a request that was refused before its route was looked for
            return scope["path"]
        return getattr(scope.get("route"), "path", "") or _OTHER
