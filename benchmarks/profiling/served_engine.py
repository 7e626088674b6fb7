"""An engine with a server's instruments and client, and a load for it, without Triton.

The caller's thread is the client: it sends requests and takes responses from a Delivery, like the thread of
a front end.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.measuring.report import Timeline
from benchmarks.measuring.workload import BenchRequest
from benchmarks.offline import to_parameters
from benchmarks.profiling.results import CacheSample
from inflight.build import build_engine, check_parameters
from inflight.core.ports import SendResponseCallback
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.endpoint.delivery import Delivery
from inflight.load_model import LoadModel, load_model

_AT_ONCE = (0.0,)


class ServedEngine:
    """A loaded engine and its loop, for the duration of a `with` block.

    Attributes:
        num_blocks: Number of KV cache blocks.
    """

    def __init__(self, settings: Mapping[str, str], load: LoadModel = load_model) -> None:
        """Load the engine. Raises ConfigError, like a server with the same parameters."""
        parameters = to_parameters(settings)
        check_parameters(parameters)
        self._folder = tempfile.TemporaryDirectory(prefix="inflight-bench-")
        self._samples: list[tuple[int, IterationCounts]] = []
        endpoint = str(Path(self._folder.name) / "engine")
        self._engine = build_engine(parameters, "", endpoint, return_metrics=self._keep, load=load)
        self.num_blocks = self._engine.client.describe().limits.num_blocks

    def run(
        self, requests: Sequence[BenchRequest], concurrency: int, pauses_s: Sequence[float] = _AT_ONCE
    ) -> list[Timeline]:
        """Send all requests, `concurrency` at a time, and return their times in order.

        Args:
            requests: At least one request.
            concurrency: Largest number of requests in flight.
            pauses_s: Seconds between each request and the previous one, independent of responses. The last
                number is used for all further requests.

        Raises:
            InflightError: The error of a failed request.
        """
        return _Run(self._engine.client.submit, requests, concurrency, pauses_s).timelines()

    def take_samples(self) -> list[CacheSample]:
        """Return the samples since the last call. Their times are relative to the first sample."""
        samples, self._samples = self._samples, []
        return [CacheSample.of(stats, when_ns - samples[0][0]) for when_ns, stats in samples]

    def _keep(self, stats: IterationCounts, metrics: MetricsSnapshot) -> None:
        self._samples.append((time.monotonic_ns(), stats))

    def __enter__(self) -> ServedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._folder.cleanup()


class _Run:
    """One load, from its first request to its last response."""

    def __init__(
        self,
        submit: Callable[[Request, SendResponseCallback], RequestHandle],
        requests: Sequence[BenchRequest],
        concurrency: int,
        pauses_s: Sequence[float],
    ) -> None:
        self._submit = submit
        self._requests = requests
        self._waiting = deque(requests)
        self._pauses_s = deque(pauses_s)
        self._concurrency = concurrency
        self._delivery: Delivery[Response] = Delivery()
        self._next_s = time.monotonic()
        self._sent_ns: dict[int, int] = {}
        self._came_ns: dict[int, list[int]] = {}
        self._num_open = 0

    def timelines(self) -> list[Timeline]:
        """Run the load and return the timelines of its requests."""
        while self._waiting or self._num_open:
            self._send_due()
            for response in self._delivery.take(self._patience_s()):
                self._take(response)
        return [
            Timeline(len(request.prompt), request.num_output_tokens, self._sent_ns[key], tuple(came_ns))
            for request, (key, came_ns) in zip(self._requests, self._came_ns.items(), strict=True)
        ]

    def _send_due(self) -> None:
        while self._may_send and time.monotonic() >= self._next_s:
            request = self._waiting.popleft()
            sent_ns = time.monotonic_ns()
            key = self._submit(
                Request(0, request.prompt, request.num_output_tokens, streaming=True), self._delivery.put
            ).request_id
            self._sent_ns[key], self._came_ns[key] = sent_ns, []
            self._num_open += 1
            self._next_s += self._pauses_s.popleft() if len(self._pauses_s) > 1 else self._pauses_s[0]

    @property
    def _may_send(self) -> bool:
        return bool(self._waiting) and self._num_open < self._concurrency

    def _patience_s(self) -> float | None:
        return max(0.0, self._next_s - time.monotonic()) if self._may_send else None

    def _take(self, response: Response) -> None:
        if response.error is not None:
            raise response.error
        if response.result is not None and response.result.num_output_tokens[0]:
            self._came_ns[response.request_id].append(time.monotonic_ns())
        self._num_open -= response.is_final
