"""Spans of requests for OpenTelemetry, sent by OTLP over HTTP in JSON.

A request has a span from its reception until its final response is passed on, and four spans inside it: `queue`
until its first iteration, `prompt` until its first token, `generation` until its last token, and `send`. Names
and attributes are those of OpenTelemetry's conventions for generative AI. A client's W3C `traceparent` makes the
span a child of the client's. The engine's process records spans when a request has ended, on the access log's
thread; the SDK sends them on another.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from inflight.core.request.request import Origin
    from inflight.core.request.response import RequestEnding

_FLUSH_MS = 2000


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request whose final response has been passed on.

    Attributes:
        origin: The request's origin.
        ending: The scheduler's part.
        num_prompt_tokens: Number of its prompt tokens.
        error: The code of the error with which it ended; "": none.
        begun_ns: When it was received, in nanoseconds since 1970.
        ended_ns: When its final response had been passed on.
        clock_ns: Nanoseconds since 1970 minus those of the monotonic clock, in which `ending` has its times.
    """

    origin: Origin
    ending: RequestEnding
    num_prompt_tokens: int
    error: str
    begun_ns: int
    ended_ns: int
    clock_ns: int


class Tracer:
    """Records the spans of requests, and sends them.

    Args:
        endpoint: URL of the collector, such as http://localhost:4318/v1/traces.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        sdk = logging.getLogger("opentelemetry")
        sdk.parent = logging.getLogger("inflight")  # to log where the engine does
        sdk.setLevel(logging.ERROR)  # spans that are lost, but not each retry
        name = os.environ.get("OTEL_SERVICE_NAME", "inflight")
        resource = Resource.create({SERVICE_NAME: name})  # and the attributes in OTEL_RESOURCE_ATTRIBUTES
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("inflight")

    def record(self, request: EndedRequest) -> None:
        """Record the spans of a request. One thread at a time."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        origin = request.origin
        parent = TraceContextTextMapPropagator().extract({"traceparent": origin.traceparent})
        span = self._tracer.start_span(
            f"{origin.operation} {origin.model}".strip(),
            parent,
            SpanKind.SERVER,
            _attributes(request),
            start_time=request.begun_ns,
        )
        if request.error:
            span.set_status(StatusCode.ERROR, request.error)
        inside = set_span_in_context(span)
        for name, begin_ns, end_ns in _phases(request):
            self._tracer.start_span(name, inside, start_time=begin_ns).end(end_ns)
        span.end(request.ended_ns)

    def flush(self) -> None:
        """Send the recorded spans, for at most two seconds."""
        self._provider.force_flush(_FLUSH_MS)

    def close(self) -> None:
        """Send what is left, for at most a few seconds. Idempotent."""
        self._provider.shutdown()


def _attributes(request: EndedRequest) -> dict[str, AttributeValue]:
    origin, ending = request.origin, request.ending
    reasons = [reason.name.lower() for reason in dict.fromkeys(ending.finish_reasons)]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": origin.operation,
        "gen_ai.provider.name": "inflight",
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": ending.num_output_tokens,
        "inflight.request_id": origin.request_id,
        "inflight.front": origin.front,
    }
    if origin.model:
        attributes["gen_ai.request.model"] = origin.model
    if request.error:
        attributes["error.type"] = request.error
    elif reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes


def _phases(request: EndedRequest) -> list[tuple[str, int, int]]:
    """Return name, begin and end of each phase that the request has reached."""
    ending, phases, begin_ns = request.ending, list[tuple[str, int, int]](), request.begun_ns
    for name, time_ns in (
        ("queue", ending.first_scheduled_ns),
        ("prompt", ending.first_token_ns),
        ("generation", ending.last_token_ns),
    ):
        if not time_ns:
            return [*phases, (name, begin_ns, request.ended_ns)]
        end_ns = max(begin_ns, time_ns + request.clock_ns)
        phases.append((name, begin_ns, end_ns))
        begin_ns = end_ns
    return [*phases, ("send", begin_ns, max(begin_ns, request.ended_ns))]
