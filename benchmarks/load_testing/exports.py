"""Convert AIPerf's and genai-perf's records of requests to the timelines of `measuring.report`.

The summaries of both tools use their own definitions, and genai-perf counts tokens by tokenizing the text
again. Therefore the records of single requests are read here, and summarized in the same way as for Triton's
gRPC.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.measuring.report import Timeline
from benchmarks.measuring.workload import BenchRequest
from inflight.server.errors import ServeError


def read_aiperf(lines: Iterable[str], requests: Sequence[BenchRequest]) -> list[Timeline]:
    """Convert an AIPerf run's profile_export.jsonl to timelines, in the order of `requests`.

    Args:
        lines: Lines of the file.
        requests: Requests that were sent. A record's `conversation_id` is an index into them.

    Raises:
        ServeError: A request failed, did not get the requested number of tokens, or was not sent exactly
            once.
    """
    records = [json.loads(line) for line in lines if line.strip()]
    records = [each for each in records if each["metadata"]["benchmark_phase"] == "profiling"]
    for record in records:
        if error := record.get("error"):
            raise ServeError(f"AIPerf: a request failed: {error}")
    sent = Counter(int(record["metadata"]["conversation_id"]) for record in records)
    if sent != Counter(range(len(requests))):
        raise ServeError(f"AIPerf was to send {len(requests)} requests once; it sent {sent.total()}")
    return [_aiperf_timeline(each, requests[int(each["metadata"]["conversation_id"])]) for each in records]


def _aiperf_timeline(record: Mapping[str, Any], request: BenchRequest) -> Timeline:
    metrics = {name: metric["value"] for name, metric in record["metrics"].items()}
    _check_count(request.num_output_tokens, int(metrics["output_sequence_length"]))
    gaps_ms = [metrics["time_to_first_token"], *metrics.get("inter_chunk_latency", ())]
    sent_ns = int(record["metadata"]["request_start_ns"])
    times_ns = tuple(sent_ns + round(1e6 * passed_ms) for passed_ms in itertools.accumulate(gaps_ms))
    return Timeline(len(request.prompt), request.num_output_tokens, sent_ns, times_ns)


def read_genai_perf(text: str, requests: Mapping[str, BenchRequest]) -> list[Timeline]:
    """Convert a genai-perf run's profile_export.json, which perf_analyzer writes, to timelines.

    Args:
        text: Text of the file.
        requests: Requests that were sent, by prompt.

    Raises:
        ServeError: The file is incomplete, or a request failed or did not end because of its length.
    """
    try:
        experiments = json.loads(text, strict=False)["experiments"]
    except json.JSONDecodeError as error:
        raise ServeError(f"perf_analyzer's export is not JSON; it ends with {text[-100:]!r}") from error
    return [
        _genai_timeline(record, requests) for experiment in experiments for record in experiment["requests"]
    ]


def _genai_timeline(record: Mapping[str, Any], requests: Mapping[str, BenchRequest]) -> Timeline:
    inputs, outputs = record["request_inputs"], record["response_outputs"]
    if "payload" in inputs:
        (prompt,) = json.loads(inputs["payload"])["prompt"]
        chunks = [_openai_chunk(output.get("response", "")) for output in outputs]
        ends = [end for _, end in chunks if end is not None]
        if ends != ["length"]:
            raise ServeError(f"a request ended with {ends or 'nothing'}, expected its length to end it")
        has_text = [has for has, _ in chunks]
    else:
        prompt = inputs["text_input"]
        has_text = [bool(output.get("text_output")) for output in outputs]
    request = requests[prompt]
    times_ns = tuple(itertools.compress(record["response_timestamps"], has_text))
    if not times_ns:
        raise ServeError(f"a request for {request.num_output_tokens} tokens was given no text: {outputs[:1]}")
    return Timeline(len(request.prompt), request.num_output_tokens, record["timestamp"], times_ns)


def _openai_chunk(response: str) -> tuple[bool, str | None]:
    """Return (whether a response has text, its finish reason or None)."""
    has_text, end = False, None
    for line in response.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ServeError(f"a request failed: {chunk['error']}")
        for choice in chunk["choices"]:
            has_text |= bool(choice["text"])
            end = choice.get("finish_reason") or end
    return has_text, end


def _check_count(expected: int, given: int) -> None:
    if given != expected:
        raise ServeError(f"a request for {expected} tokens was given {given}")
