"""An OTLP collector in this process, which keeps the spans that it gets."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Collector(HTTPServer):
    """A collector at a free port.

    Attributes:
        spans: The spans received so far, in OTLP's JSON.
        resources: The attributes of their senders.
    """

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in json.loads(body)["resourceSpans"]:
                    collector.resources.append(attributes(resource["resource"]))
                    for scope in resource["scopeSpans"]:
                        collector.spans += scope["spans"]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def one_request(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the only request's span, and its phases by name."""
        phases = {span["name"]: span for span in self.spans if span.get("kind") != 2}
        (request,) = (span for span in self.spans if span.get("kind") == 2)
        assert all(span["parentSpanId"] == request["spanId"] for span in phases.values())
        assert {span["traceId"] for span in self.spans} == {request["traceId"]}
        return request, phases


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span or a resource by their names."""

    def value_of(value: dict[str, Any]) -> Any:
        ((kind, found),) = value.items()
        if kind == "arrayValue":
            return [value_of(each) for each in found["values"]]
        return int(found) if kind == "intValue" else found

    return {each["key"]: value_of(each["value"]) for each in span.get("attributes", [])}
