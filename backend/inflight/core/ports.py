"""Protocols and callback types that the core and the loop need from outside, without implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.stats import IterationStats
from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.guide import Guide, GuideEvent
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import EngineDescription, IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason, StopSignal
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch

GetInferenceRequestsCallback = Callable[[int], Sequence[Request]]
"""Takes how many requests fit now (negative: any number), and returns at most as many new ones. Never blocks."""

SendResponseCallback = Callable[[Response], None]
"""Takes one response, with its id, outputs, final flag and error. Never blocks."""

WaitUntilSent = Callable[[float], bool]
"""Takes a number of seconds, and waits at most as long until every response that was handed over in this process
has been sent on; returns whether all have been."""

PollStopSignalCallback = Callable[[], Sequence[StopSignal]]
"""Returns the stop signals since the last call. Called at the end of every iteration. Never blocks."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""Takes the statistics of an iteration as a JSON string. Not called for iterations without active requests."""

ReturnMetricsCallback = Callable[[IterationStats, MetricsSnapshot], None]
"""Takes the same statistics as values, and the metrics since the start. Called as often as the statistics, and
once more when the last active request has ended. Never blocks."""


class Engine(Protocol):
    """The device side. Only the loop thread calls it.

    Batches are decoded in the order of their forward passes. `limits.num_due` says how many may be forwarded
    before: with one micro-batch a second one only behind a batch that samples on the device. A batch whose
    `forward` raised is not decoded.
    """

    @property
    def limits(self) -> EngineLimits:
        """The limits, which do not change once the engine is loaded."""
        ...

    def forward(self, batch: ScheduledBatch) -> Any:
        """Apply the batch's deltas and begin its forward pass.

        Returns what `decode` takes, opaque to the loop: for the torch engine the logits of the sampled rows
        (`ScheduledBatch.sampled_slots`), a [num_sampled_rows, vocab_size] float32 tensor on the device, or the
        tokens that were chosen from them.
        """
        ...

    def decode(self, batch: ScheduledBatch, logits: Any, /) -> ModelOutput:
        """Choose the next token of every sampled row and remember it as the slot's last token.

        For a batch that samples on the device `forward` has begun that, and this waits for the tokens.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


class Runner(Protocol):
    """One rank's part of a model on a device: an `Engine` without the choice of tokens. Loop thread."""

    @property
    def limits(self) -> EngineLimits:
        """Fixed once it is loaded, and the same on all ranks."""
        ...

    def forward(self, batch: ScheduledBatch, hidden: Any = None) -> Any:
        """Compute this rank's layers.

        Args:
            batch: As for `Engine.forward`.
            hidden: Behind the first stage, the hidden states that the stage before has made.

        Returns:
            At the last stage what tokens are chosen from, before it the hidden states for the next stage.
        """
        ...

    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Take over what another rank has chosen; batches without rows of these slots may have begun since."""
        ...

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """Refuse to carry on in the slots of a batch that failed on some rank until sequences start there again.

        Batches that have begun `since` may have started some of those slots anew.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


class GuideCompiler(Protocol):
    """Finds out whether guides can be followed, while the loop goes on. Only the loop thread calls this.

    Whoever implements it wakes an idle loop when there are events.
    """

    def submit(self, request_id: int, guide: Guide) -> None:
        """Ask for an event about this request's guide. Never blocks."""
        ...

    def events(self) -> tuple[GuideEvent, ...]:
        """The events of guides since the last call. A request whose guide is known has its event at once."""
        ...

    def forget(self, request_id: int) -> None:
        """A request has ended: nothing more is said of it. A guide that nobody waits for need not be compiled."""
        ...


class AdapterCache(Protocol):
    """Rank 0's adapters on the host: finds or stores what requests want. Only the loop thread calls this.

    An adapter that an active request uses stays. Whoever implements it wakes an idle loop when there is an update.
    """

    def submit(self, request_id: int, lora: LoraRequest) -> None:
        """Ask for an event about this request's adapter. Never blocks."""
        ...

    def update(self) -> AdapterUpdate:
        """The news of adapters since the last call. A request whose adapter is stored has its event at once."""
        ...

    def forget(self, request_id: int) -> None:
        """A request has ended: its adapter may be evicted, and nothing more is said of the request."""
        ...


class Adapters(Protocol):
    """The adapter commands that front ends may give, beside using adapters in requests. Any thread."""

    def expect_weights(self, request_id: int, num_bytes: int) -> None:
        """A request brings weights, which wait until the adapter cache has them; at once.

        Raises Unavailable if too many wait already: the request is not to be queued.
        """
        ...

    def give_up_weights(self, request_id: int) -> None:
        """Drop the weights of a request that has ended before the adapter cache was asked for them; at once."""
        ...

    def list_adapters(self) -> Sequence[AdapterState]:
        """Every adapter that requests can use: named ones, loaded or not, and those that clients have sent."""
        ...

    def load(self, name: str, path: str, timeout_s: float) -> None:
        """Read the folder of the adapter `name` into host memory, which raises what a request would get.

        Args:
            name: Of one that has a folder, or with `path` a new one.
            path: Its folder, below the server's `lora_dir`; "": the one that it has.
            timeout_s: How long to wait; after that Unavailable is raised, and the folder is read all the same.
        """
        ...

    def unload(self, name: str, task_id: int | None) -> None:
        """Free an adapter's host memory, once no request uses it; raises NotFound for one that there is not.

        A named one is read again with its next request; one that a client has sent is gone.

        Args:
            name: Its name; "": it goes by `task_id`.
            task_id: Its id.
        """
        ...


class Ranks(Protocol):
    """The ranks that run one model in step. Each has a GptManager of its own; all see the same IterationInputs.

    The leader, rank 0, has the callbacks that face clients. While requests are active, which every scheduler
    knows, each iteration begins with one broadcast from the leader. While none is, the followers sleep in a call
    that uses no CPU, and the leader wakes them before its next broadcast. Only the loop thread calls this. Every
    method raises Unavailable once a rank is known to be lost.
    """

    @property
    def is_leader(self) -> bool:
        """Whether this process is rank 0."""
        ...

    def share(self, inputs: IterationInput, are_asleep: bool) -> None:
        """Broadcast the leader's inputs; `are_asleep` says that the followers have to be woken first."""
        ...

    def follow(self, is_asleep: bool) -> IterationInput | None:
        """Wait, as a follower, for what the leader shares next; None once it has ended.

        `is_asleep` says that the last iteration left no request active, so that the leader will wake this rank
        first.
        """
        ...

    def end(self, are_asleep: bool) -> None:
        """Tell the followers that nothing more will be shared: `follow` returns None to all of them."""
        ...


class EngineClient(Protocol):
    """How a front end reaches the batcher: in this process or through the engine endpoint, the same calls.

    `submit` never blocks. Responses arrive by `on_response` on a thread of the client's, which also may call
    back into `submit` and `stop`. Exactly one final response arrives for every submit that returned.
    """

    def describe(self) -> EngineDescription:
        """The engine's description; raises Unavailable while no engine can be reached."""
        ...

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        """Queue `request` under a new id, whatever `request_id` it has, and return its handle."""
        ...

    def reserve_id(self) -> int:
        """An id that no request will run under, for one that is answered without the engine."""
        ...

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """End the request with this id, or one of its sequences, early; unknown ids are ignored.

        Whoever has the request's handle calls its `stop`.
        """
        ...

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        """Register a front end's unsent responses, for which an engine in the same process may wait."""
        ...

    def state(self, timeout_s: float) -> str:
        """JSON of what the batcher is doing (`core/report/state.py`); blocks for up to `timeout_s`.

        Raises Unavailable without an engine, Unsupported from an engine that does not tell.
        """
        ...

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Carry a command out and return all adapters that there are then.

        Blocks for up to about `timeout_s` seconds. Raises Unavailable without an engine or when the time is up,
        Unsupported from an engine that takes no commands, and what is wrong with this one.
        """
        ...

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """The reports that the batcher has kept since the last call; raises Unavailable without an engine.

        Args:
            kind: What to fetch.
            timeout_s: How long to wait for events of the KV cache; None: until there are some. The others are
                there at once.
        """
        ...

    def close(self) -> None:
        """Release threads and connections. Requests in flight are answered first. Idempotent."""
        ...
