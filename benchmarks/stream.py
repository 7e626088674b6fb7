"""Measure the cost of streaming through a real server, and the time from a token's sampling to its arrival.

Starts a tritonserver with a fake engine whose forward pass takes a fixed time, and opens N gRPC streams at
once with perf_analyzer. Prints responses and tokens per second, processor time per response of each process,
and the streams' lag: the time from the sampling of a token, which a trace records, until the client gets it.
Waiting responses are merged if the sender falls behind, so a stream should wait no longer than it takes to
send one response to every other stream.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

from benchmarks.analyzer import Answer, analyze, engine_stub, process_ids
from benchmarks.measuring.options import new_parser
from benchmarks.measuring.real_server import GrowingTrace
from benchmarks.measuring.report import Percentiles
from benchmarks.measuring.workload import BenchRequest
from inflight.arguments import positive
from inflight.batch_manager.recording import Begin, End
from inflight.core.schedule.batch import ScheduledBatch
from inflight.server.launch import TritonServer
from inflight.server.repository import default_repository
from inflight.testing.fake_server import serve_fake

_PROMPT_TOKENS = 16
_SLOTS = 256
_KV_CACHE_TOKENS = 1_200_000
_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Lag:
    """Lag of a stream behind the engine, at each of its responses.

    Attributes:
        waits_ms: Milliseconds from the sampling of a response's oldest token until its arrival.
        tokens: Number of tokens that were sampled between this oldest token and the response's arrival.
    """

    waits_ms: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Processor seconds used so far by the engine's process, by tritonserver, and by the client."""

    stub: float
    tritonserver: float
    client: float

    @classmethod
    def now(cls, server: TritonServer) -> ProcessorTime:
        """Measure the processor time of `server` and of all clients that have ended."""
        client = resource.getrusage(resource.RUSAGE_CHILDREN)
        stub = engine_stub(process_ids(server))
        return cls(_seconds(stub), _seconds(server.pid), client.ru_utime + client.ru_stime)

    def __sub__(self, earlier: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(
            self.stub - earlier.stub, self.tritonserver - earlier.tritonserver, self.client - earlier.client
        )

    def of_each_us(self, num_responses: int) -> dict[str, float]:
        """Return the times divided by the number of responses, in microseconds."""
        return {name: round(1e6 * seconds / num_responses, 1) for name, seconds in asdict(self).items()}


def _seconds(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


class TokenTimes:
    """Sampling times of each token of each prompt, from a trace, in monotonic nanoseconds."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, ...]] = {}  # by request
        self._requests: dict[int, int] = {}  # by slot
        self._batches: dict[int, ScheduledBatch] = {}  # in flight, by iteration
        self.of_prompt: dict[tuple[int, ...], list[int]] = {}

    def read(self, records: Iterable[Begin | End]) -> None:
        """Read further records of the trace."""
        for record in records:
            if isinstance(record, Begin):
                self._begin(record)
            elif record.output is not None:
                self._end(record)

    def _begin(self, record: Begin) -> None:
        for request in record.inputs.new_requests:
            self._prompts[request.request_id] = request.input_token_ids
            self.of_prompt[request.input_token_ids] = []
        self._requests.update((start.slot, start.request_id) for start in record.starts)
        if record.batch is not None:
            self._batches[record.batch.iteration] = record.batch

    def _end(self, record: End) -> None:
        batch = self._batches.pop(record.iteration)
        assert record.output is not None
        for slot, tokens in zip(batch.sampled_slots(), record.output.token_ids):
            times = self.of_prompt[self._prompts[self._requests[slot]]]
            times += [record.now_ns] * len(tokens)


def lag_of(times_ns: Sequence[int], counts: Sequence[int], chosen_ns: Sequence[int]) -> Lag:
    """Return the lag of one stream.

    Args:
        times_ns: Arrival times of the stream's responses.
        counts: Number of tokens of each response.
        chosen_ns: Sampling time of each token, by the same clock.
    """
    waits, behind = [], []
    for came, count, delivered in zip(times_ns, counts, accumulate(counts, initial=0)):
        if count:
            waits.append(1e-6 * (came - chosen_ns[delivered]))
            behind.append(bisect_right(chosen_ns, came) - delivered)
    return Lag(tuple(waits), tuple(behind))


def draw(num_streams: int, num_tokens: int, first: int) -> list[BenchRequest]:
    """Draw requests with distinct prompts, which also differ from the prompts drawn with another `first`."""
    prompts = [(first, number, *range(10, 8 + _PROMPT_TOKENS)) for number in range(num_streams)]
    return [BenchRequest(prompt, num_tokens) for prompt in prompts]


def summarize(answers: Sequence[Answer], lags: Sequence[Lag]) -> dict[str, float]:
    """Return rates between the first and the last response, and lags of all streams and of the slowest."""
    times = [time for answer in answers for time in answer.times_ns]
    seconds = 1e-9 * (max(times) - min(times))
    num_responses = len(times)
    num_tokens = sum(map(sum, (answer.counts for answer in answers)))
    waits = [wait for lag in lags for wait in lag.waits_ms]
    medians = [statistics.median(lag.waits_ms) for lag in lags]
    figures = {
        "responses_per_s": num_responses / seconds,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_response": num_tokens / num_responses,
        "lag_ms_median": statistics.median(waits),
        "lag_ms_p99": Percentiles.of(waits).p99,
        "lag_ms_max": max(waits),
        "lag_ms_median_of_quickest_stream": min(medians),
        "lag_ms_median_of_slowest_stream": max(medians),
        "tokens_behind_max": max(max(lag.tokens) for lag in lags),
    }
    return {name: round(value, 2) for name, value in figures.items()}


class Bench:
    """Measurements on one server."""

    def __init__(self, server: TritonServer, trace: Path) -> None:
        self._server = server
        self._trace = GrowingTrace(trace)
        self._rounds = itertools.count(1)

    def measure(self, num_streams: int, num_tokens: int) -> dict[str, Any]:
        """Measure streams of `num_tokens` tokens. The costs of equal streams with one token are subtracted."""
        start = ProcessorTime.now(self._server)
        self._run(num_streams, 1)
        begun = ProcessorTime.now(self._server)
        answers = self._run(num_streams, num_tokens)
        spent = ProcessorTime.now(self._server) - begun - (begun - start)
        num_responses = sum(len(answer.times_ns) for answer in answers) - num_streams
        row = {"streams": num_streams, **summarize(answers, self._lags(answers))}
        return {**row, "cpu_us_per_response": spent.of_each_us(num_responses)}

    def _run(self, num_streams: int, num_tokens: int) -> list[Answer]:
        requests = draw(num_streams, num_tokens, next(self._rounds))
        return analyze(self._server, requests, num_streams)

    def _lags(self, answers: Sequence[Answer]) -> list[Lag]:
        token_times = TokenTimes()
        token_times.read(self._trace.new_records())
        ahead_ns = time.time_ns() - time.monotonic_ns()
        return [
            lag_of(
                [time_ns - ahead_ns for time_ns in answer.times_ns],
                answer.counts,
                token_times.of_prompt[answer.request.prompt],
            )
            for answer in answers
        ]


def settings(step_us: int, stream_interval: int, trace: Path) -> dict[str, str]:
    """Return the parameters of a fake engine with the demo model's tokenizer, so that texts are decoded, too."""
    return {
        "fake_engine": f"vocab={_VOCABULARY},step_us={step_us}",
        "tokenizer_dir": str(default_repository() / "tensorrt_llm/1/demo_model"),
        "max_batch_size": str(_SLOTS),
        "max_tokens_in_paged_kv_cache": str(_KV_CACHE_TOKENS),
        "stream_interval": str(stream_interval),
        "record_path": str(trace),
    }


def main() -> None:
    parser = new_parser("stream", __doc__)
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument(
        "--step-us", type=positive, nargs="+", default=[5000, 20000], help="time of a forward pass"
    )
    parser.add_argument("--tokens", type=positive, default=500, help="tokens of each stream")
    parser.add_argument("--stream-interval", type=positive, default=1, help="the parameter stream_interval")
    arguments = parser.parse_args()
    rows = []
    for step_us in arguments.step_us:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            with serve_fake(settings=settings(step_us, arguments.stream_interval, trace)) as server:
                bench = Bench(server, trace)
                for num_streams in arguments.streams:
                    rows.append({"step_us": step_us, **bench.measure(num_streams, arguments.tokens)})
                    print(rows[-1], flush=True)
    print(json.dumps({"bench": "stream", "stream_interval": arguments.stream_interval, "rows": rows}))


if __name__ == "__main__":
    main()
