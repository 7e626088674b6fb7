"""Protocols and callback types that the core and the loop need from outside, without implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from inflight.core.kv.block_store import StoreCommands, StoreUpdate
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.stats import IterationCounts
from inflight.core.request.adapter import AdapterUpdate, LoraRequest
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.guide import Guide, GuideEvent
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import IterationInput, Origin, Request
from inflight.core.request.response import Response
from inflight.core.request.sleep import SleepAction
from inflight.core.request.stop import StopReason, StopSignal
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch

GetInferenceRequestsCallback = Callable[[int], Sequence[Request]]
"""A function that returns at most the given number of new requests (negative: any number). Never blocks."""

SendResponseCallback = Callable[[Response], None]
"""A function of one response, with its id, outputs, final flag and error. Never blocks."""

WaitUntilSent = Callable[[float], bool]
"""A function that waits until every response passed to a front end in this process has been sent, for at most the
given number of seconds; it returns whether all of them have been sent."""

PollStopSignalCallback = Callable[[], Sequence[StopSignal]]
"""A function that returns the stop signals since the last call. Called at the end of every iteration. Never
blocks."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""A function of an iteration's statistics as a JSON string. Not called for iterations without active requests."""

ReturnMetricsCallback = Callable[[IterationCounts, MetricsSnapshot], None]
"""A function of an iteration's statistics as values, and the metrics since the start. Called for each iteration
with active requests, and once more when the last active request has ended. Never blocks."""


class Engine(Protocol):
    """A model on its device: runs forward passes and samples tokens. Used on the loop thread.

    Batches are decoded in the order of their forward passes. `limits.num_due` returns how many batches must be
    decoded before the next forward pass: with a single micro-batch, `forward` may be called for a second batch
    before `decode` for the first only if the first samples on the device. A batch whose `forward` raised is not
    decoded.
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
        """Sample the next token of every sampled row, and store it as the slot's last token.

        If the batch samples on the device, `forward` has already started sampling, and `decode` waits for the
        tokens.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


class StageMessages(Protocol):
    """The messages between a rank and other pipeline stages in the forward pass of one batch."""

    def receive_hidden(self) -> Any:
        """Return the hidden states from the previous stage; wait for them. Not at the first stage.

        Raises:
            StepFailed: The batch has failed in the previous stage.
        """
        ...

    def receive_guesses(self) -> Sequence[int]:
        """Return the draft tokens that the last stage has guessed (`ScheduledBatch.with_guesses`); wait for them.
        Before the last stage.

        Raises:
            StepFailed: The batch has failed in the last stage.
        """
        ...

    def send_guesses(self, token_ids: Sequence[int]) -> None:
        """Send the guessed draft tokens to the earlier stages. At the last stage."""
        ...


class Runner(Protocol):
    """One rank's part of a model on a device: an `Engine` that does not sample tokens. Loop thread."""

    @property
    def limits(self) -> EngineLimits:
        """The limits, fixed once the model is loaded and equal on all ranks."""
        ...

    def forward(self, batch: ScheduledBatch, messages: StageMessages | None = None) -> Any:
        """Run the forward pass of a batch through this rank's layers.

        Args:
            batch: As for `Engine.forward`.
            messages: The messages of other pipeline stages; None: there is one stage.

        Returns:
            At the last stage, the input of sampling (see `Engine.forward`); at earlier stages, the hidden states
            for the next stage.
        """
        ...

    def remember(self, batch: ScheduledBatch, output: ModelOutput) -> None:
        """Record the tokens that another rank has sampled for `batch`. Later batches without rows in these
        slots may already have started."""
        ...

    def forget(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch] = ()) -> None:
        """Mark the slots of a batch that failed on some rank as void until a sequence starts in them again.

        `since` are the batches that were started after the failed one; slots in which they have started a sequence
        stay valid.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


class GuideCompiler(Protocol):
    """Compiles guides in the background and reports which guides are usable. Used on the loop thread.

    An implementation wakes an idle loop when it has events.
    """

    def submit(self, request_id: int, guide: Guide, origin: Origin | None = None) -> None:
        """Request an event about this request's guide; `origin` is for log lines. Never blocks."""
        ...

    def events(self) -> tuple[GuideEvent, ...]:
        """Return the events since the last call. The event of a guide that is already compiled comes at once."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop an ended request: no event about it follows, and its guide is compiled only if another request
        waits for the guide."""
        ...


class AdapterCache(Protocol):
    """Rank 0's adapters in host memory: finds or stores the adapters of requests. Used on the loop thread.

    An adapter in use by an active request is not evicted. An implementation wakes an idle loop when it has an
    update.
    """

    def submit(self, request_id: int, lora: LoraRequest, origin: Origin | None = None) -> None:
        """Request an event about this request's adapter; `origin` is for log lines. Never blocks."""
        ...

    def update(self) -> AdapterUpdate:
        """Return the changes since the last call. The event of an adapter that is already stored comes at once."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop an ended request: its adapter may be evicted, and no event about the request follows."""
        ...


class BlockStore(Protocol):
    """KV blocks in host memory or files (`core/kv/block_store.py`). Used on the loop thread.

    A block that cannot be saved or read is dropped: no method raises because of it. An implementation wakes an
    idle loop when it has an update.
    """

    def carry_out(self, commands: StoreCommands) -> None:
        """Copy the blocks to save from the device, then begin the loads, which do not block."""
        ...

    def update(self) -> StoreUpdate:
        """Return the changes since the last call."""
        ...

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Take account of an iteration that computed `num_tokens` tokens of context in this time.

        Blocks are not loaded while computing them is faster.
        """
        ...

    def close(self) -> None:
        """Write what waits to be saved, for a few seconds at most, and free memory and threads. Idempotent."""
        ...


class Adapters(Protocol):
    """The adapter commands of front ends, besides requests that use adapters. Any thread."""

    def expect_weights(self, request_id: int, num_bytes: int) -> None:
        """Count `num_bytes` of adapter weights in a request as waiting, until the adapter cache has stored
        them. Never blocks.

        Raises Unavailable if too many bytes are waiting already; then the request must not be queued.
        """
        ...

    def give_up_weights(self, request_id: int) -> None:
        """Stop counting the weights of a request that ended before the adapter cache stored them. Never blocks."""
        ...

    def list_adapters(self) -> Sequence[AdapterState]:
        """Return every adapter that requests can use: named adapters, loaded or not, and adapters sent by
        clients."""
        ...

    def load(self, name: str, path: str, timeout_s: float, replaces: bool = False) -> None:
        """Read the folder of the adapter `name` into host memory; raises the error that a request would get.

        Args:
            name: A known name, or, together with `path`, a new one.
            path: The adapter's folder, below the server's `lora_dir`; "" means the folder that the name
                already has.
            timeout_s: How long to wait before raising Unavailable, in seconds; reading continues after that.
            replaces: Whether to read the folder again if the adapter is loaded, and to accept another folder for a
                name that `load` has given. If the new folder is refused, the name keeps its old one.
        """
        ...

    def unload(self, name: str, task_id: int | None) -> None:
        """Free an adapter's host memory once no request uses it; raises NotFound for an unknown adapter.

        A named adapter is read again by its next request, unless `load` gave the name, which is then dropped; an
        adapter sent by a client is lost.

        Args:
            name: The adapter's name; "" to select it by `task_id`.
            task_id: The adapter's id.
        """
        ...


class ModelMemory(Protocol):
    """The memory of an engine's weights and KV cache, which an idle engine can give back. Any thread."""

    @property
    def can_keep_cache(self) -> bool:
        """Whether `release` can keep the KV cache."""
        ...

    def release(self, keeps_cache: bool = False) -> None:
        """Give the memory back; no request may be active.

        The contents of the KV cache are lost, unless `keeps_cache`. A cache that was kept can be given back later.
        """
        ...

    def load(self) -> None:
        """Load the model again, after `release`; raises ConfigError if that fails, and may be called again."""
        ...


class Receipts(Protocol):
    """Makes the engine's part of receipts. Any thread."""

    @property
    def is_ready(self) -> bool:
        """Whether `part` can be called: the digests of the model's files are known, or an error is."""
        ...

    def prepare(self) -> None:
        """Start to compute the digests of the model's files, at the first call. Never blocks.

        Raises Unavailable if they could not be computed.
        """
        ...

    def part(self, adapter_digest: bytes) -> str:
        """Return the engine's part of a receipt; raises Unavailable if the digests could not be computed.

        Args:
            adapter_digest: Digest of the request's adapter; b"" without one.
        """
        ...


class Ranks(Protocol):
    """The ranks that run one model in lockstep. Each has its own GptManager; all get the same IterationInputs.

    Only the leader, rank 0, has callbacks to clients. While requests are active, each iteration begins with a
    broadcast from the leader. While no request is active, which every rank's scheduler knows, the followers
    sleep in a call that uses no CPU, and the leader wakes them before its next broadcast. Used on the loop
    thread. Every method raises Unavailable once a rank is known to be lost.
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
        """Tell all followers that there are no more inputs: their `follow` returns None. See `share`."""
        ...


class EngineClient(Protocol):
    """A front end's connection to the batcher, in this process or through the engine endpoint.

    `submit` never blocks. Responses arrive through `on_response` on a thread of the client; `on_response` may call
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

        With a request's handle, call `RequestHandle.stop` instead.
        """
        ...

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        """Register a function that waits until a front end has sent its responses; an engine in this process calls
        it."""
        ...

    def state(self, timeout_s: float) -> str:
        """Return the batcher's state as JSON (`core/report/state.py`); blocks for up to `timeout_s` seconds.

        Raises Unavailable if there is no engine, Unsupported if the engine does not report its state.
        """
        ...

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Carry out a command and return the state of all adapters after it.

        Blocks for up to about `timeout_s` seconds. Raises Unavailable without an engine or when the time is up,
        Unsupported if the engine supports no adapter commands, and the command's own error if it fails.
        """
        ...

    def sleep(self, action: SleepAction, timeout_s: float, only_weights: bool = False) -> bool:
        """Carry out a command about the engine's sleep; return whether the engine sleeps or is falling asleep.

        With `only_weights` the engine keeps its KV cache in sleep. Blocks for up to about `timeout_s` seconds.
        Raises Unavailable without an engine, if requests in flight do not finish in time, or if the model cannot
        be loaded again; Unsupported if the engine cannot sleep in this way.
        """
        ...

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the reports kept since the last call; raises Unavailable without an engine.

        Args:
            kind: The kind of report.
            timeout_s: How long to wait for KV cache events or metrics; None waits until there are some. Other
                reports are returned at once.
        """
        ...

    def close(self) -> None:
        """Release threads and connections. Requests in flight are answered first. Idempotent."""
        ...
