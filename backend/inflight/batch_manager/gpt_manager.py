"""GptManager: the iteration loop that turns requests into responses.

A GptManager owns one worker thread, from construction to shutdown, which calls the engine, the scheduler and the
callbacks. Independent of Triton and the device. Callbacks must not block: while the loop waits for a callback, no
request gets tokens. Specification: The Batch Manager in TensorRT-LLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from inflight.batch_manager.inputs import Inputs, LeadersInputs, OwnInputs
from inflight.batch_manager.instruments import NO_INSTRUMENTS, Inspections, Instruments
from inflight.batch_manager.send_window import SendWindow
from inflight.core.ports import (
    AdapterCache,
    BlockStore,
    Engine,
    GetInferenceRequestsCallback,
    GuideCompiler,
    PollStopSignalCallback,
    Ranks,
    ReturnBatchManagerStatsCallback,
    SendResponseCallback,
    WaitUntilSent,
)
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.request import IterationInput, Origin
from inflight.core.request.response import Response
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import (
    AlreadyExists,
    InflightError,
    InvalidArgument,
    NotFound,
    StepFailed,
    Unavailable,
    Unsupported,
    without_places,
)

_log = logging.getLogger(__name__)


class GptManager:
    """In-flight batching over one engine.

    If several batches may be in flight, the oldest is decoded once the maximum number is reached, or when no other
    batch can be made before. With several ranks, each has a GptManager; on a follower the callbacks for
    requests and stop signals are never called, and responses are dropped.

    Args:
        engine: The engine; this object closes it.
        scheduler: The scheduler, made for this engine's limits.
        get_inference_requests: Called at the start of every iteration with the maximum number of requests to
            accept, negative for any number.
        send_response: Called with each response, exactly one of which is final for each request. An exception is
            logged and affects no other response.
        poll_stop_signal: Called at the end of every iteration. Stops of requests that are not active then are
            ignored, even if their ids are used again later.
        return_batch_manager_stats: Called at the end of every iteration that had active requests, with its
            statistics as a JSON string.
        stats_period_ns: Minimum time between two reports of statistics in nanoseconds; 0: every iteration
            is reported.
        on_death: Called once if the loop itself fails or a rank is lost, after every active request was answered.
            The callback must answer the requests that were not fetched yet.
        instruments: Observers of the loop; this object closes them.
        clock_ns: Monotonic clock in nanoseconds; injected by tests.
        ranks: The ranks that run the model in lockstep, including this one; None with a single rank.
        wait_until_sent: For an engine that computes on all processors: responses are sent between two iterations
            (`SendWindow`). None: they are sent while the engine computes.
        guides: Compiles the guides of requests; None: requests with guides are refused.
        adapters: Finds or stores the adapters of requests; None: requests with adapters are refused.
        block_store: Saves and loads KV blocks; this object closes it. Every rank has one, and only rank 0's
            says what has changed. None: they are not saved.
        start: Whether to start the worker thread; if not, the caller has to call `step`.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None = None,
        return_batch_manager_stats: ReturnBatchManagerStatsCallback | None = None,
        stats_period_ns: int = 0,
        on_death: Callable[[InflightError], None] | None = None,
        instruments: Instruments = NO_INSTRUMENTS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        ranks: Ranks | None = None,
        wait_until_sent: WaitUntilSent | None = None,
        guides: GuideCompiler | None = None,
        adapters: AdapterCache | None = None,
        block_store: BlockStore | None = None,
        start: bool = True,
    ) -> None:
        self._engine = engine
        self._block_store = block_store
        self._scheduler = scheduler
        if ranks is None or ranks.is_leader:
            self._send_response = send_response
            self._inputs: Inputs = OwnInputs(
                scheduler,
                get_inference_requests,
                poll_stop_signal,
                clock_ns,
                ranks,
                guides,
                adapters,
                block_store,
            )
        else:
            self._send_response = _drop
            self._inputs = LeadersInputs(scheduler, ranks)
        self._has_other_ranks = ranks is not None
        self._window = SendWindow(self._hand_over, wait_until_sent, clock_ns) if wait_until_sent else None
        # Each batch with the result or error of `forward`.
        self._in_flight: deque[tuple[ScheduledBatch, Any]] = deque()
        self._origins: dict[int, Origin] = {}  # by the ids of unanswered requests; for log lines
        self._return_stats = return_batch_manager_stats
        self._stats_period_ns = stats_period_ns
        self._next_stats_ns = 0
        self._on_death = on_death
        self._instruments = instruments
        self._inspections = Inspections(scheduler, instruments)
        self._has_news = True  # whether metrics may have changed since they were published
        self._work = threading.Event()
        self._shutting_down = False
        self._thread = threading.Thread(target=self._loop, name="gpt-manager", daemon=True)
        if start:
            self._thread.start()

    def notify(self) -> None:
        """Wake an idle loop, as there may be new requests or stop signals. Any thread."""
        self._work.set()

    def state(self, timeout_s: float) -> str:
        """Return the scheduler's state (`core/report/state.py`) and recent statistics as JSON.

        Waits at most `timeout_s` seconds for the end of the current iteration. If it does not end in time, the
        answer reports this, and describes the stuck iteration and the scheduler's state in it. May be
        called on any thread except the loop thread.
        """
        return self._inspections.ask(timeout_s, self.notify)

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the reports kept since the last call, or the metrics after the current iteration.

        Waits at most `timeout_s` seconds. Any thread except the loop thread.
        """
        if kind is ReportKind.METRICS:
            return self._inspections.metrics(timeout_s, self.notify)
        return self._instruments.reports(kind, timeout_s)

    def close_engine(self, keeps_cache: bool = False) -> None:
        """Close the engine between two iterations, when no request is active. Idempotent.

        No request may be accepted until `replace_engine`. Any thread except the loop thread. Raises Unavailable
        once the loop has ended.

        Args:
            keeps_cache: Whether the next engine has this one's KV cache; otherwise its content is forgotten.
        """
        while not self._inspections.ask_loop(lambda batch: self._close_idle_engine(keeps_cache), self.notify):
            pass  # the last batch is in flight, or saved blocks are being loaded

    def replace_engine(self, engine: Engine) -> None:
        """Use `engine`, which has room for what the scheduler hands out, after `close_engine`.

        Any thread except the loop thread. Raises Unavailable once the loop has ended.
        """

        def replace(batch: ScheduledBatch | None) -> None:
            self._engine = engine

        self._inspections.ask_loop(replace, self.notify)

    def _close_idle_engine(self, keeps_cache: bool) -> bool:
        if self._in_flight or self._scheduler.num_active:
            return False
        if self._block_store is not None:
            self._block_store.carry_out(self._scheduler.take_store_commands())
            if self._scheduler.is_loading_blocks:
                return False
        self._engine.close()
        self._scheduler.forget_device(keeps_cache)
        return True

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds until the loop has ended, normally or not; return whether it has
        ended."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Finish the active requests, end the worker thread, close the engine. Idempotent.

        Specification: the worker thread terminates when there are no more active requests. A follower's thread
        ends when its leader's thread has ended, or a rank is lost.

        Args:
            timeout_s: How long to wait in seconds; None: without limit.

        Returns:
            Whether the thread has ended. A thread that waits for the device, or for a rank 0 that continues,
            cannot be ended and keeps the engine.
        """
        self._shutting_down = True
        self.notify()
        has_ended = self.join(timeout_s)
        self._inspections.close()
        if not has_ended:
            _log.error(
                "the generation loop did not end in %g s: it waits for the device or for rank 0", timeout_s
            )
            return False
        if self._block_store is not None:
            self._block_store.close()
        self._engine.close()
        self._instruments.close()
        return True

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        try:
            while True:
                self._work.clear()
                if self.step() or self._work.is_set():
                    continue
                is_done = self._inputs.are_over or not self._scheduler.num_active
                if is_done and (self._shutting_down or self._inputs.are_over):
                    break
                self._work.wait(self._seconds_to_deadline())
            self._inputs.end()
        except Unavailable as error:
            _log.error("the generation loop ends: %s", error)
            self._die(error)
        except BaseException:  # waiting clients must be answered, whatever the error
            _log.exception("the generation loop died; every request is answered with UNAVAILABLE")
            self._die(Unavailable("the generation loop died; see the server's log"))

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next held request may time out, so long an idle loop may sleep; None: no
        limit."""
        deadline_ns = self._scheduler.next_deadline_ns
        if deadline_ns is None or not self._scheduler.num_active:
            return None
        return max(0.0, (deadline_ns - self._inputs.now_ns()) / 1e9)

    def _die(self, error: InflightError) -> None:
        try:
            refused = [
                Response(request.request_id, error=error, is_final=True) for request in self._inputs.fetched
            ]
            if self._window is not None:
                self._window.flush()
            self._hand_over(refused + self._scheduler.fail_all(error))
        finally:
            self._inspections.close()
            if self._on_death:
                self._on_death(error)

    def step(self) -> bool:
        """Run one iteration: get, schedule, run, decode, update, send, stop, report.

        Returns whether there was anything to do; the loop may sleep only if there was not. Requests that could not
        be accepted because the queue was full are fetched by the iteration after places became free. If all
        requests wait for guides, adapters or KV blocks, there is nothing to do until `notify` is called because
        one is ready, or a request times out. A follower instead sleeps in the call that waits for its leader's
        inputs, and returns False once the leader has ended.
        """
        num_before = self._scheduler.num_active
        was_active = num_before > 0
        inputs = self._inputs.next()
        if inputs is None:
            return False
        is_idle = not (was_active or inputs.new_requests or inputs.adapters or inputs.blocks)
        if not is_idle:
            self._instruments.begin(inputs.iteration, self._scheduler)
        self._origins.update({each.request_id: each.origin for each in inputs.new_requests if each.origin})
        responses = self._scheduler.accept(inputs)
        batch = self._schedule(responses)
        if self._block_store is not None:
            self._block_store.carry_out(self._scheduler.take_store_commands())
        if not is_idle:
            self._instruments.scheduled(inputs, batch)
        if batch is not None:
            self._in_flight.append((batch, self._forward(batch)))
        num_due = self._engine.limits.num_due(len(self._in_flight), batch)
        for _ in range(num_due):
            responses += self._finish_batch(*self._in_flight.popleft())
        if self._block_store is not None and batch is not None:
            self._block_store.computed(
                batch.num_context_tokens, (self._inputs.now_ns() - inputs.now_ns) / 1e9
            )
        had_work = batch is not None or num_due > 0 or self._scheduler.num_active > 0
        self._send(responses)
        has_more = self._inputs.look_ahead()
        self._report(inputs, batch, had_work)
        self._instruments.end()
        self._inspections.answer(batch)
        can_rest = not had_work or (batch is None and num_due == 0 and self._scheduler.can_only_wait)
        # After the end of a request, the next iteration's inputs may have a request for which there was no
        # room, and let adapters and guides forget the ended request.
        has_ended = num_before + len(inputs.new_requests) > self._scheduler.num_active
        return not can_rest or bool(inputs.new_requests) or has_more or has_ended

    def _schedule(self, responses: list[Response]) -> ScheduledBatch | None:
        """Return the next batch. If `schedule` raises, return None and add the resulting responses."""
        try:
            return self._scheduler.schedule()
        except Exception as error:  # a defect that one request triggers must not end the others
            # Other ranks may have made a batch, and cannot run it without this rank.
            if self._has_other_ranks:
                raise
            _log.exception("the scheduler failed: the faulty request is being searched for")
            failure = StepFailed(
                without_places(f"this request could not be scheduled: {type(error).__name__}: {error}")
            )
            responses += self._scheduler.recover(failure, len(self._in_flight))
            return None

    def _forward(self, batch: ScheduledBatch) -> Any:
        try:
            return self._engine.forward(batch)
        except Exception as error:  # whatever a device raises, only its batch has failed
            return _as_step_failure(batch, error, self._only_origin(batch))

    def _finish_batch(self, batch: ScheduledBatch, logits: Any) -> list[Response]:
        outcome = logits if isinstance(logits, InflightError) else self._decode(batch, logits)
        now_ns = self._inputs.now_ns()
        self._instruments.answered(outcome, now_ns)
        if isinstance(outcome, InflightError):
            return self._scheduler.fail(batch, outcome)
        return self._scheduler.update(batch, outcome, now_ns)

    def _decode(self, batch: ScheduledBatch, logits: Any) -> ModelOutput | InflightError:
        try:
            return self._engine.decode(batch, logits)
        except Exception as error:  # as in `_forward`
            return _as_step_failure(batch, error, self._only_origin(batch))

    def _only_origin(self, batch: ScheduledBatch) -> Origin | None:
        """Return the origin of the batch's rows if they all belong to one request, as its log lines name it."""
        slots = {chunk.slot for chunk in batch.context} | set(batch.generation_slots)
        requests = [each.request for each in self._scheduler.running_sequences if slots & set(each.slots)]
        return requests[0].origin if len({each.request_id for each in requests}) == 1 else None

    def _send(self, responses: list[Response]) -> None:
        if self._window is None:
            self._hand_over(responses)
        else:
            self._window.add(responses)

    def _hand_over(self, responses: Sequence[Response]) -> None:
        for response in responses:
            try:
                self._send_response(response)
            except Exception:  # a faulty receiver must not end other requests
                origin = self._origins.get(response.request_id)
                _log.exception(
                    "the send callback failed for a response of request %d",
                    response.request_id,
                    extra=None if origin is None else origin.log_extra,
                )
            if response.is_final:
                self._origins.pop(response.request_id, None)

    def _report(self, inputs: IterationInput, batch: ScheduledBatch | None, had_work: bool) -> None:
        """Report an iteration with active requests; report the metrics once more after the last request has
        ended."""
        self._instruments.collect(self._scheduler)
        self._has_news |= bool(inputs.new_requests)
        if not had_work:
            if self._has_news:
                self._has_news = False
                self._instruments.publish(self._scheduler.stats(None), self._scheduler.metrics())
            return
        self._has_news = True
        is_told = self._return_stats is not None or self._instruments.return_metrics is not None
        now_ns = self._inputs.now_ns()
        is_due = is_told and now_ns >= self._next_stats_ns
        if not (is_due or self._instruments.wants_every_iteration):
            return
        stats = self._scheduler.stats(batch, now_ns - inputs.now_ns)
        self._instruments.keep(stats, self._scheduler, batch)
        if is_due:
            self._next_stats_ns = now_ns + self._stats_period_ns
            self._instruments.publish(stats, self._scheduler.metrics())
            if self._return_stats is not None:
                self._return_stats(stats.to_json(time.time()))


def _drop(response: Response) -> None:
    """The send callback of a follower: clients get the response from the leader."""


def _as_step_failure(batch: ScheduledBatch, error: Exception, origin: Origin | None) -> InflightError:
    """Log `error`, and return the error for a batch's requests; called while `error` is being handled."""
    log_arguments = "iteration %d failed with %d rows in it", batch.iteration, batch.num_rows
    log_extra = None if origin is None else origin.log_extra
    # Errors about a client's input.
    if isinstance(error, (InvalidArgument, Unsupported, NotFound, AlreadyExists)):
        _log.warning(*log_arguments, exc_info=True, extra=log_extra)
        return error
    _log.exception(*log_arguments, extra=log_extra)
    if isinstance(error, InflightError):
        return error
    return StepFailed(
        without_places(f"the iteration that carried this request failed: {type(error).__name__}: {error}")
    )
