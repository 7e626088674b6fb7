"""Protocols and callback types that the core and the loop need from outside, without implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.stats import IterationCounts
from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.guide import Guide, GuideEvent
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason, StopSignal
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch

GetInferenceRequestsCallback = Callable[[int], Sequence[Request]]
"""Takes how many more requests fit (negative: any number) and returns at most that many. Never blocks."""

SendResponseCallback = Callable[[Response], None]
"""Takes one response, with its id, outputs, final flag and error. Never blocks."""

WaitUntilSent = Callable[[float], bool]
"""Waits until every response handed over in this process has been sent, for at most the given number of seconds.
Returns whether all of them have been sent."""

PollStopSignalCallback = Callable[[], Sequence[StopSignal]]
"""Returns the stop signals since the last call. Called at the end of every iteration. Never blocks."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""Takes the statistics of an iteration as a JSON string. Not called for iterations without active requests."""

ReturnMetricsCallback = Callable[[IterationCounts, MetricsSnapshot], None]
"""Takes the same statistics as values, and the metrics since the start. Called as often as the statistics, and
once more when the last active request has ended. Never blocks."""


class Engine(Protocol):
    """A model on its device: runs forward passes and samples tokens. Only the loop thread calls it.

    Batches are decoded in the order of their forward passes. `limits.num_due` says how many batches must be
    decoded before the next forward pass: with a single micro-batch, a second batch may be forwarded before the
    first is decoded only if the first samples on the device. A batch whose `forward` raised is not decoded.
    """

    @property
    def limits(self) -> EngineLimits:
        """The limits, which do not change once the engine is loaded."""
        ...

    def forward(self, batch: ScheduledBatch) -> Any:
        """Apply the batch's deltas and begin its forward pass.

        Returns the argument for `decode`, which is opaque to the loop. For the torch engine it is the logits of
        the sampled rows (`ScheduledBatch.sampled_slots`), a [num_sampled_rows, vocab_size] float32 tensor on the
        device, or the tokens already sampled from them.
        """
        ...

    def decode(self, batch: ScheduledBatch, logits: Any, /) -> ModelOutput:
        """Choose the next token of every sampled row and remember it as the slot's last token.

        If the batch samples on the device, `forward` has already started that, and this waits for the tokens.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


class Runner(Protocol):
    """One rank's part of a model on a device: an `Engine` without the choice of tokens. Loop thread."""

    @property
    def limits(self) -> EngineLimits:
        """The limits, fixed once the model is loaded and equal on all ranks."""
        ...

    def forward(self, batch: ScheduledBatch, hidden: Any = None) -> Any:
        """Compute this rank's layers.

        Args:
            batch: As for `Engine.forward`.
            hidden: The hidden states from the previous pipeline stage; None at the first stage.

        Returns:
            At the last stage the input of sampling (see `Engine.forward`); before it the hidden states for the
            next stage.
        """
        ...

    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Record the tokens another rank sampled. Batches with no row in these slots may have started since."""
        ...

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """Mark the slots of a batch that failed on some rank as void until a sequence starts in them again.

        `since` are the batches started after it; they may have restarted some of those slots.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


class GuideCompiler(Protocol):
    """Compiles guides in the background and reports which ones are usable. Only the loop thread calls this.

    An implementation wakes an idle loop when it has events.
    """

    def submit(self, request_id: int, guide: Guide) -> None:
        """Request an event about this request's guide. Never blocks."""
        ...

    def events(self) -> tuple[GuideEvent, ...]:
        """Return the events since the last call. A guide that is already compiled gives its event at once."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop an ended request: no event about it follows, and its guide is compiled only if another request
        waits."""
        ...


class AdapterCache(Protocol):
    """Rank 0's adapters in host memory: finds or stores the adapters of requests. Only the loop thread calls this.

    An adapter in use by an active request is not evicted. An implementation wakes an idle loop when it has an
    update.
    """

    def submit(self, request_id: int, lora: LoraRequest) -> None:
        """Request an event about this request's adapter. Never blocks."""
        ...

    def update(self) -> AdapterUpdate:
        """Return the changes since the last call. An adapter that is already stored gives its event at once."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop an ended request: its adapter may be evicted, and no event about the request follows."""
        ...


class Adapters(Protocol):
    """The adapter commands that front ends may give, beside using adapters in requests. Any thread."""

    def expect_weights(self, request_id: int, num_bytes: int) -> None:
        """Reserve room for the weights a request brings, until the adapter cache takes them. Never blocks.

        Raises Unavailable if too many weights are waiting already; then the request must not be queued.
        """
        ...

    def give_up_weights(self, request_id: int) -> None:
        """Drop the weights of a request that ended before the adapter cache took them. Never blocks."""
        ...

    def list_adapters(self) -> Sequence[AdapterState]:
        """Every adapter that requests can use: named ones, loaded or not, and those that clients have sent."""
        ...

    def load(self, name: str, path: str, timeout_s: float) -> None:
        """Read the folder of the adapter `name` into host memory; raises the error that a request would get.

        Args:
            name: A known name, or, together with `path`, a new one.
            path: The adapter's folder, below the server's `lora_dir`; "" means the folder it already has.
            timeout_s: How long to wait before raising Unavailable. The folder is read to the end all the same.
        """
        ...

    def unload(self, name: str, task_id: int | None) -> None:
        """Free an adapter's host memory once no request uses it; raises NotFound for an unknown adapter.

        A named adapter is read again by its next request; an adapter sent by a client is lost.

        Args:
            name: The adapter's name; "" to select it by `task_id`.
            task_id: The adapter's id.
        """
        ...


class Ranks(Protocol):
    """The ranks that run one model in step. Each has a GptManager of its own; all see the same IterationInputs.

    The leader, rank 0, has the callbacks that face clients. While requests are active, each iteration begins with
    a broadcast from the leader. While none are active (every scheduler knows that), the followers sleep in a call
    that uses no CPU, and the leader wakes them before its next broadcast. Only the loop thread calls this. Every
    method raises Unavailable once a rank is known to be lost.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this process is rank 0."""
        ...

    def share(self, inputs: IterationInput, are_asleep: bool) -> None:
        """Broadcast the leader's inputs; `are_asleep`: the followers must be woken first."""
        ...

    def follow(self, is_asleep: bool) -> IterationInput | None:
        """Wait, as a follower, for the leader's next inputs; None once the leader has ended.

        `is_asleep`: no request was active after the last iteration, so the leader will wake this rank first.
        """
        ...

    def end(self, are_asleep: bool) -> None:
        """End the sharing of inputs: `follow` returns None on all followers."""
        ...


class EngineClient(Protocol):
    """How a front end reaches the batcher: in this process or through the engine endpoint, the same calls.

    `submit` never blocks. Responses arrive through `on_response` on a thread of the client, which may itself call
    `submit` and `stop`. Every `submit` that returned gets exactly one final response.
    """

    def describe(self) -> EngineDescription:
        """The engine's description; raises Unavailable while no engine can be reached."""
        ...

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        """Queue `request` under a new id, ignoring its own `request_id`, and return its handle."""
        ...

    def reserve_id(self) -> int:
        """Return an id that no request will get, for a request that is answered without the engine."""
        ...

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """End the request with this id, or one of its sequences, early; unknown ids are ignored.

        The holder of a request's handle calls `RequestHandle.stop` instead.
        """
        ...

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        """Register a function that waits for a front end's unsent responses; an engine in the same process
        calls it."""
        ...

    def state(self, timeout_s: float) -> str:
        """Return the batcher's state as JSON (`core/report/state.py`); blocks for up to `timeout_s` seconds.

        Raises Unavailable if there is no engine, Unsupported if the engine does not report its state.
        """
        ...

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Carry out a command and return all adapters as they are afterwards.

        Blocks for up to about `timeout_s` seconds. Raises Unavailable without an engine or when the time is up,
        Unsupported if the engine takes no adapter commands, and the command's own error if it fails.
        """
        ...

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the reports kept since the last call; raises Unavailable without an engine.

        Args:
            kind: The kind of report.
            timeout_s: How long to wait for KV cache events; None waits until there are some. Other reports are
                returned at once.
        """
        ...

    def close(self) -> None:
        """Release threads and connections. Requests in flight are answered first. Idempotent."""
        ...
