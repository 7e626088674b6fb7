"""Requests, responses and fakes of the batcher for the endpoint's tests."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from inflight.core.report.reports import Reports
from inflight.core.request.adapter_command import AdapterState
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.request import Request
from inflight.core.request.response import Response, SequenceResult
from inflight.core.request.stop import FinishReason, StopSignal
from inflight.endpoint.local import LocalEngineClient
from inflight.errors import NotFound, Unavailable

PATIENCE_S = 60.0

DESCRIPTION = EngineDescription(
    ModelLimits(
        vocab_size=1000, max_sequence_length=256, max_input_length=255, num_blocks=32, tokens_per_block=16
    ),
    model_path="/models/tiny",
    eos_token_ids=(2, 3),
)


def make_request(
    prompt: tuple[int, ...] = (1, 2, 3), new: int = 4, streaming: bool = True, **fields
) -> Request:
    return Request(0, prompt, new, streaming, **fields)


def make_result(
    *tokens: int, reason: FinishReason = FinishReason.NOT_FINISHED, sequence_index: int = 0, **fields
) -> SequenceResult:
    return SequenceResult((tokens,), 3, (len(tokens),), (reason,), sequence_index, **fields)


def delta(request_id: int, *tokens: int, final: bool = False, sequence_index: int = 0) -> Response:
    """A response with some tokens of a sequence; `final` ends the sequence and the request."""
    reason = FinishReason.LENGTH if final else FinishReason.NOT_FINISHED
    result = make_result(*tokens, reason=reason, sequence_index=sequence_index, is_sequence_final=final)
    return Response(request_id, result, is_final=final)


class Inbox:
    """An `on_response` that keeps responses."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.finished = threading.Event()
        self._queue: queue.SimpleQueue[Response] = queue.SimpleQueue()

    def __call__(self, response: Response) -> None:
        self.responses.append(response)
        self._queue.put(response)
        if response.is_final:
            self.finished.set()

    def next(self) -> Response:
        """Wait for the next response."""
        return self._queue.get(timeout=PATIENCE_S)

    def final(self) -> Response:
        """Wait for the final response and check that it is the only one and the last."""
        assert self.finished.wait(PATIENCE_S)
        assert [response.is_final for response in self.responses].count(True) == 1
        assert self.responses[-1].is_final
        return self.responses[-1]

    @property
    def tokens(self) -> list[int]:
        """Return all tokens so far."""
        return [token for r in self.responses if r.result for token in r.result.output_token_ids[0]]


class FakeAdapters:
    """Fake adapters that consist of names; `calls` has the calls.

    Attributes:
        max_bytes: Limit of a request's weights in bytes.
        waiting: Bytes of weights by request id.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.max_bytes = 1000
        self.waiting: dict[int, int] = {}
        self._loaded: dict[str, AdapterState] = {}

    def expect_weights(self, request_id: int, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise Unavailable("too many weights wait")
        self.waiting[request_id] = num_bytes

    def give_up_weights(self, request_id: int) -> None:
        self.waiting.pop(request_id, None)

    def list_adapters(self) -> list[AdapterState]:
        return list(self._loaded.values())

    def load(self, name: str, path: str, timeout_s: float, replaces: bool = False) -> None:
        self.calls.append(("load", name, path, timeout_s, replaces))
        self._loaded[name] = AdapterState(name, None, path, True, 8, 100)

    def unload(self, name: str, task_id: int | None) -> None:
        self.calls.append(("unload", name, task_id))
        if self._loaded.pop(name, None) is None:
            raise NotFound(f"there is no adapter {name or task_id}")


class Batcher:
    """A LocalEngineClient whose loop is the test itself.

    Attributes:
        read_state: Function that returns its state; tests may replace it.
        reports: The answer to `reports`, whatever the kind.
        adapters: Its adapters.
    """

    def __init__(self, description: EngineDescription = DESCRIPTION) -> None:
        self._work = threading.Semaphore(0)
        self.read_state: Callable[[float], str] = lambda timeout_s: json.dumps({"timeout_s": timeout_s})
        self.reports = Reports()
        self.adapters = FakeAdapters()
        self.client = LocalEngineClient(
            description,
            self._work.release,
            lambda timeout_s: self.read_state(timeout_s),
            lambda kind, timeout_s: self.reports,
            adapters=self.adapters,
        )

    def take(self) -> Request:
        """Wait for the next request."""
        while not (requests := self.client.get_inference_requests(1)):
            assert self._work.acquire(timeout=PATIENCE_S)
        return requests[0]

    def stops(self, count: int) -> set[StopSignal]:
        """Wait for `count` stop signals and return them without their times."""
        signals: set[StopSignal] = set()
        while len(signals) < count:
            signals.update(replace(signal, requested_ns=0) for signal in self.client.poll_stop_signals())
            assert len(signals) >= count or self._work.acquire(timeout=PATIENCE_S)
        return signals

    def answer(self, request: Request, *tokens: int, final: bool = True) -> None:
        self.client.send_response(delta(request.request_id, *tokens, final=final))
