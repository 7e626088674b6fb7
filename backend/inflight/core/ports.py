"""What the core and the loop ask of the outside, as Protocols; nothing here is implemented."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationStats
from inflight.core.request.description import EngineDescription
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason, StopSignal
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.errors import InflightError

GetInferenceRequestsCallback = Callable[[int], Sequence[Request]]
"""Takes the most requests that fit now (negative: any number), returns new ones. Never blocks."""

SendResponseCallback = Callable[[Response], None]
"""Takes one response: id, outputs, final flag and error in one frozen value. Never blocks."""

WaitUntilSent = Callable[[float], bool]
"""Waits until every response that was handed over in this process has been sent on, for at most so many seconds;
returns whether they have been."""

PollStopSignalCallback = Callable[[], Sequence[StopSignal]]
"""Returns the requests to stop. Called at the end of every iteration."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""Takes the statistics of an iteration as a JSON string. Not called without active requests."""

ReturnMetricsCallback = Callable[[IterationStats, MetricsSnapshot], None]
"""Takes the same statistics as values, and what was observed since the start. Called as often as the statistics,
and once more when the last active request has ended. Never blocks."""


class Recorder(Protocol):
    """Is told everything it takes to run the same schedule again. Called on the loop thread."""

    def begin(self, inputs: IterationInput, batch: ScheduledBatch | None) -> None:
        """What entered an iteration and what was made of it, before it runs."""

    def end(self, output: ModelOutput | None, error: InflightError | None, now_ns: int) -> None:
        """What the device answered, or how it failed, and when; not called for an iteration without a batch."""

    def close(self) -> None:
        """Nothing more follows. Idempotent."""


class Engine(Protocol):
    """The device side. One thread calls it, the loop's.

    Batches are decoded in the order of their forward passes; how many may be forwarded before, `limits.num_due`
    says: with one micro-batch, none but behind one that feeds itself. A batch whose `forward` raised is not
    decoded.
    """

    @property
    def limits(self) -> EngineLimits:
        """Fixed once the engine is loaded."""

    def forward(self, batch: ScheduledBatch) -> Any:
        """Apply the batch's deltas and begin its forward pass.

        Returns what `decode` takes, opaque to the loop: for the torch engine the logits of the sampled rows
        (`ScheduledBatch.sampled_slots`), a [num_sampled_rows, vocab_size] float32 tensor on the device, or the
        choice among them.
        """

    def decode(self, batch: ScheduledBatch, logits: Any, /) -> ModelOutput:
        """Choose the next token of every sampled row and remember it as the slot's last token.

        Of a batch that feeds itself `forward` has begun that, and this tells what was chosen.
        """

    def close(self) -> None:
        """Free the device's memory. Idempotent."""


class Ranks(Protocol):
    """The ranks that run one model in step. Each has a GptManager of its own; all see the same IterationInputs.

    The leader, rank 0, has the callbacks that face clients. While requests are active, which every scheduler
    knows, each iteration begins with one broadcast from the leader. While none is, the followers are asleep, in a
    call that uses no CPU, and the leader wakes them for its next broadcast. Called on the loop thread; every
    method raises Unavailable once a rank is known to be lost.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""

    def share(self, inputs: IterationInput, are_asleep: bool) -> None:
        """The leader's broadcast; `are_asleep`: the last iteration left no request active, so wake them first."""

    def follow(self, is_asleep: bool) -> IterationInput | None:
        """A follower's: what the leader shares next; None once it has ended.

        `is_asleep`: the last iteration left no request active, so wait to be woken first.
        """

    def end(self, are_asleep: bool) -> None:
        """The leader shares nothing more: `follow` returns None everywhere."""


class Outbox(Protocol):
    """Where a front end keeps the responses that it has not sent yet."""

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait until there are none, for `timeout_s` at most; whether there are none. Any thread."""


class EngineClient(Protocol):
    """How a front end reaches the batcher: in this process or through the engine endpoint, the same calls.

    `submit` never blocks. Responses arrive by `on_response` on a thread of the client's, which also may call
    back into `submit` and `stop`. Exactly one final response arrives for every submit that returned.
    """

    def describe(self) -> EngineDescription:
        """Limits and names; raises Unavailable while no engine can be reached."""

    def submit(self, request: Request, on_response: SendResponseCallback) -> int:
        """Queue `request` and return the id it runs under (the given `request_id` is replaced)."""

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """End a request, or one of its sequences, early. Goes by the id that `submit` returned; ignores others."""

    def add_outbox(self, outbox: Outbox) -> None:
        """Name a front end's outbox, which an engine in the same process may wait for between two iterations."""

    def state(self, timeout_s: float) -> str:
        """JSON of what the batcher is doing (`core/report/state.py`); blocks for up to `timeout_s`.

        Raises Unavailable without an engine, Unsupported from an engine that does not tell.
        """

    def close(self) -> None:
        """Release threads and connections. Requests in flight are answered first. Idempotent."""
