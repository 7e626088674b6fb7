"""Spans of requests at a collector: phases, parents, errors, by every front end."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from typing import Any

import httpx
import pytest

from inflight.config import Parameters
from inflight.core.request.request import Origin
from inflight.core.request.response import RequestEnding
from inflight.core.request.stop import FinishReason
from inflight.errors import ConfigError, InvalidArgument
from inflight.parameter_spec import declared_rows
from inflight.tensors.request_parameters import read_request_parameters
from inflight.tensors.spec import Vocabulary
from inflight.tracing import EndedRequest, Tracer
from tests.collector import Collector, attributes, collecting
from tests.openai_endpoint.serving import fake_engine, served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
START_NS = 1_800_000_000_000_000_000


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def ended(error: str = "", traceparent: str = "", **times: int) -> EndedRequest:
    """A request that begins at 0 ms and ends at 100 ms of a clock that is an hour ahead of the monotonic one."""
    ending = RequestEnding(7, (FinishReason.LENGTH,), **{name: ms * 10**6 for name, ms in times.items()})
    origin = Origin("triton", "r1", "tiny", operation="chat", traceparent=traceparent)
    return EndedRequest(origin, ending, 12, error, START_NS, START_NS + 10**8, START_NS)


def milliseconds(span: dict[str, Any]) -> tuple[int, int]:
    begin, end = (int(span[name]) - START_NS for name in ("startTimeUnixNano", "endTimeUnixNano"))
    return begin // 10**6, end // 10**6


def test_a_request_has_a_span_with_its_phases(collector: Collector) -> None:
    tracer = Tracer(collector.url)
    tracer.record(ended(traceparent=TRACEPARENT, first_scheduled_ns=10, first_token_ns=30, last_token_ns=90))
    tracer.close()
    span, phases = collector.one_request()
    assert (span["name"], span["traceId"], span["parentSpanId"]) == ("chat tiny", TRACE, PARENT)
    assert milliseconds(span) == (0, 100)
    assert {name: milliseconds(each) for name, each in phases.items()} == {
        "queue": (0, 10),
        "prompt": (10, 30),
        "generation": (30, 90),
        "send": (90, 100),
    }
    assert attributes(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "inflight",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.finish_reasons": ["length"],
        "inflight.request_id": "r1",
        "inflight.front": "triton",
    }
    assert collector.resources[0]["service.name"] == "inflight"


def test_a_failed_request_has_the_phases_that_it_reached(collector: Collector) -> None:
    tracer = Tracer(collector.url)
    tracer.record(ended("UNAVAILABLE", "nonsense", first_scheduled_ns=10))
    tracer.close()
    span, phases = collector.one_request()
    assert "parentSpanId" not in span or not span["parentSpanId"], "a context that is not W3C's is ignored"
    assert span["status"] == {"code": 2, "message": "UNAVAILABLE"}
    assert attributes(span)["error.type"] == "UNAVAILABLE"
    assert {name: milliseconds(each) for name, each in phases.items()} == {
        "queue": (0, 10),
        "prompt": (10, 100),
    }


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": [5] * 9}, "text_completion demo"),
        ("/v1/completions", {"prompt": [5] * 9, "stream": True}, "text_completion demo"),
    ],
)
def test_requests_of_v1_are_traced_below_their_clients(
    collector: Collector, path: str, body: dict[str, Any], name: str
) -> None:
    with fake_engine(otlp_traces_endpoint=collector.url) as engine, served(engine) as url:
        headers = {"traceparent": TRACEPARENT, "X-Request-Id": "mine"}
        answer = httpx.post(
            f"{url}{path}", json={"model": "demo", "max_tokens": 3, **body}, headers=headers, timeout=60
        )
        assert answer.status_code == 200
    span, phases = collector.one_request()
    assert (span["name"], span["traceId"], span["parentSpanId"]) == (name, TRACE, PARENT)
    found = attributes(span)
    assert (found["inflight.request_id"], found["gen_ai.usage.input_tokens"]) == ("mine", 9)
    assert found["gen_ai.usage.output_tokens"] == 3
    assert list(phases) == ["queue", "prompt", "generation", "send"]
    edges = [int(phases[each]["startTimeUnixNano"]) for each in phases] + [int(span["endTimeUnixNano"])]
    assert edges == sorted(edges) and edges[0] == int(span["startTimeUnixNano"])


def test_a_trace_context_comes_from_triton_as_a_request_parameter() -> None:
    given = json.dumps({"traceparent": TRACEPARENT})
    assert read_request_parameters(given, 0, Vocabulary.TOKENS).traceparent == TRACEPARENT
    with pytest.raises(InvalidArgument, match="request parameter traceparent is 7, expected text"):
        read_request_parameters('{"traceparent": 7}', 0, Vocabulary.TOKENS)


def test_lost_spans_are_logged_once_by_the_engines_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries are not logged."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # seconds, in which there are retries
    handler = BufferingHandler(100)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        tracer = Tracer(f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces")
        logging.getLogger("inflight").addHandler(handler)
        try:
            tracer.record(ended(first_scheduled_ns=10))
            tracer.close()
        finally:
            logging.getLogger("inflight").removeHandler(handler)
    (record,) = [each for each in handler.buffer if each.name.startswith("opentelemetry")]
    assert "Failed to export span" in record.getMessage()


def test_a_collector_that_is_no_url_is_refused() -> None:
    row = declared_rows(Parameters)["otlp_traces_endpoint"]
    with pytest.raises(
        ConfigError, match="otlp_traces_endpoint: got 'localhost:4317', expected a URL such as http"
    ):
        row.parse("localhost:4317")
