"""Spans of requests by Triton's protocols, below the spans of their clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc

from inflight.testing.fake_server import serve_fake
from tests.collector import attributes, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PROMPT = np.arange(3, 12, dtype=np.int32)[None]


def test_requests_of_triton_are_traced_below_their_clients(elsewhere: Path) -> None:
    """By gRPC's metadata, and by a request parameter."""
    with collecting() as collector:
        with serve_fake(settings={"otlp_traces_endpoint": collector.url}) as server:
            http = f"http://127.0.0.1:{server.ports.http}/v2/models/tensorrt_llm/generate"
            body = {"input_ids": PROMPT[0].tolist(), "request_output_len": 3}
            requests.post(http, json=body | HEADERS, timeout=60).raise_for_status()
            inputs = []
            for name, values in (("input_ids", PROMPT), ("request_output_len", np.array([[3]], np.int32))):
                inputs.append(tritonclient.grpc.InferInput(name, values.shape, "INT32"))
                inputs[-1].set_data_from_numpy(values)
            with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as client:
                client.start_stream(lambda result, error: None, headers=HEADERS)
                client.async_stream_infer("tensorrt_llm", inputs)
                client.stop_stream()
        found = [span for span in collector.spans if span.get("kind") == 2]
        assert len(found) == 2 and len(collector.spans) == 10
        for span in found:
            assert (span["traceId"], span["parentSpanId"]) == (TRACE, PARENT)
            assert span["name"] == "text_completion tensorrt_llm"
            assert attributes(span)["gen_ai.usage.input_tokens"] == 9
            assert attributes(span)["gen_ai.usage.output_tokens"] == 3


def test_a_collector_that_is_no_url_stops_the_start(elsewhere: Path) -> None:
    with pytest.raises(Exception, match="otlp_traces_endpoint: got 'localhost:4317', expected a URL"):
        serve_fake(settings={"otlp_traces_endpoint": "localhost:4317"}).__enter__()
