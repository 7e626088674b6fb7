"""Send each request once to a real server with perf_analyzer, by gRPC streams, and read the times.

Defines perf_analyzer's arguments, and reads its export. perf_analyzer is a separate program, so that the
client's cost is not part of this process.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import perf_analyzer
from benchmarks.measuring.report import Timeline
from benchmarks.measuring.workload import BenchRequest
from inflight.server import runtime_directory
from inflight.server.errors import ServeError
from inflight.server.launch import TritonServer

TIMEOUT_S = 3600.0

_MODEL = "tensorrt_llm"
_IDLE = re.compile(r'request_type="active".* 0$', re.MULTILINE)  # in Triton's metrics
_ENGINE_STUB = b"/tensorrt_llm/1/model.py"


@dataclass(frozen=True, slots=True)
class Answer:
    """The responses to one request.

    Attributes:
        request: The request.
        sent_ns: Time of sending, in nanoseconds of the system's clock.
        times_ns: Arrival times of the responses, by the same clock.
        counts: Number of tokens of each response.
    """

    request: BenchRequest
    sent_ns: int
    times_ns: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def timeline(self) -> Timeline:
        """Return the times of the responses that have tokens."""
        times_ns = tuple(itertools.compress(self.times_ns, self.counts))
        return Timeline(len(self.request.prompt), self.request.num_output_tokens, self.sent_ns, times_ns)


def analyze(server: TritonServer, requests: Sequence[BenchRequest], concurrency: int) -> list[Answer]:
    """Send every request once, `concurrency` at a time. Raises ServeError with the cause of a failure."""
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as folder:
        data = Path(folder) / "requests.json"
        write_input(data, requests)
        # One thread sends the requests in order, and the next one when any request has ended. Several
        # threads would divide the requests in advance.
        experiments = perf_analyzer.export(
            ["-m", _MODEL, "-i", "grpc", "-u", server.grpc, "--streaming", "--async", "--max-threads", "1"]
            + ["--input-data", str(data), "--concurrency-range", str(min(concurrency, len(requests)))]
            + ["--request-count", str(len(requests))],
            timeout=TIMEOUT_S,
            is_idle=lambda: _is_idle(server),
        )
    return read_experiments(experiments, requests)


def write_input(path: Path, requests: Sequence[BenchRequest]) -> None:
    """Write the file for perf_analyzer's --input-data."""
    entries = [
        {
            "input_ids": {"content": list(request.prompt), "shape": [len(request.prompt)]},
            "request_output_len": [request.num_output_tokens],
            "end_id": [-1],
            "streaming": [True],
        }
        for request in requests
    ]
    path.write_text(json.dumps({"data": entries}))


def read_experiments(
    experiments: Sequence[Mapping[str, Any]], requests: Sequence[BenchRequest]
) -> list[Answer]:
    """Read all answers from perf_analyzer's export. Raises ServeError unless every request ran once and ended."""
    records = [record for experiment in experiments for record in experiment["requests"]]
    sent = Counter(map(_request_of, records))
    if sent != Counter(requests):
        raise ServeError(
            f"perf_analyzer was to send {len(requests)} requests once; it sent {sent.total()}, "
            f"{len(sent & Counter(requests))} of these"
        )
    return [_answer(record) for record in records]


def engine_stub(pids: Sequence[int]) -> int:
    """Return the process id of the model with the engine, among a server's processes."""
    return next(pid for pid in pids if _ENGINE_STUB in Path(f"/proc/{pid}/cmdline").read_bytes())


def process_ids(server: TritonServer) -> list[int]:
    """Return the ids of all of a server's processes."""
    return [process.pid for process in runtime_directory.find_processes(server.repository.path.parent)]


def _is_idle(server: TritonServer) -> bool:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        return _IDLE.search(page.read().decode()) is not None


def _request_of(record: Mapping[str, Any]) -> BenchRequest:
    inputs = record["request_inputs"]
    return BenchRequest(tuple(inputs["input_ids"]), inputs["request_output_len"])


def _answer(record: Mapping[str, Any]) -> Answer:
    request = _request_of(record)
    counts = tuple(outputs["sequence_length"] for outputs in record["response_outputs"])
    if sum(counts) != request.num_output_tokens:
        raise ServeError(f"a request for {request.num_output_tokens} tokens was given {sum(counts)}")
    return Answer(request, record["timestamp"], tuple(record["response_timestamps"]), counts)
