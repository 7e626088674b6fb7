"""The engine client for front ends in this process, and the callbacks that feed the batcher.

Owns the requests that the batcher has not fetched, the stop signals that it has not polled, and the callback
of each unanswered request. The client is connected to the batcher by functions only: `notify` wakes the
batcher, and the batcher calls three callbacks.

`describe`, `submit`, `stop`, `state` and `adapters` may be called on any thread. The batcher's loop thread
calls `get_inference_requests`, `poll_stop_signals` and `send_response`, and responses are delivered on this
thread. Only `fail_all`, `drain` and `close` deliver on their caller's thread, if the loop has failed, hangs
or has ended.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from inflight.access_log import AccessLog
from inflight.config import SEQUENCES_PER_ITERATION
from inflight.core.ports import Adapters, ModelMemory, Receipts, SendResponseCallback, WaitUntilSent
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.results import ended_before_start
from inflight.core.request.sleep import SleepAction
from inflight.core.request.stop import FINISH_REASON_OF_STOP, FinishReason, StopReason, StopSignal
from inflight.endpoint.delivery import ResponseTarget
from inflight.endpoint.sleep import Sleep
from inflight.errors import InflightError, Unavailable, Unsupported
from inflight.tracing import Tracer

_log = logging.getLogger(__name__)
_Waiting = TypeVar("_Waiting")
_TOKENS_OF_A_SEQUENCE = 1024
"""Number of prompt tokens whose checking and copying takes as long as the other work for a new sequence."""
_PATIENCE_S = 5.0
_BETWEEN_ROUNDS_S = 2.0
"""Seconds for which `drain` waits for the next round of a request that is answered in rounds."""
_SHUTTING_DOWN = "the server is shutting down"


class LocalEngineClient:
    """An `EngineClient` for front ends, and the callbacks of a GptManager.

    Args:
        description: The result of `describe`.
        notify: Function that wakes the batcher's loop if it is idle. Called without any lock.
        read_state: Function that takes a timeout in seconds and returns the batcher's state as a JSON
            object. It raises Unavailable once the loop has ended. None if the batcher does not report its
            state.
        read_reports: Function that takes a kind and a timeout in seconds, and returns reports like
            `reports`. None if the batcher keeps no reports.
        adapters: Executes adapter commands; None: there are no such commands.
        receipts: Makes the engine's part of receipts; None: there are no receipts.
        tracer: Records the spans of requests; None: no spans are recorded.
        memory: Gives back the model's memory; None: the engine cannot sleep.
    """

    def __init__(
        self,
        description: EngineDescription,
        notify: Callable[[], None],
        read_state: Callable[[float], str] | None = None,
        read_reports: Callable[[ReportKind, float | None], Reports] | None = None,
        adapters: Adapters | None = None,
        receipts: Receipts | None = None,
        tracer: Tracer | None = None,
        memory: ModelMemory | None = None,
    ) -> None:
        self._description = description
        self._notify = notify
        self._read_state = read_state
        self._read_reports = read_reports
        self._adapters = adapters
        self._receipts = receipts
        self._sleep = Sleep(memory, self._finish_requests, self._cancel_requests)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._outboxes: tuple[WaitUntilSent, ...] = ()
        self._access_log = AccessLog(tracer)
        self._targets: dict[int, ResponseTarget] = {}  # of all unanswered requests
        self._queue: dict[int, Request] = {}  # in order of arrival
        self._with_receipt: set[int] = set()  # unanswered requests that want a receipt
        self._stopped_in_queue: dict[int, list[Response]] = {}
        self._stop_signals: list[StopSignal] = []
        self._refusal: str | None = None
        self._refuses_all = False  # continuations too
        # Unanswered requests that may be followed by another round, for which a drain waits.
        self._to_be_continued: set[int] = set()
        self._continued_until_s = 0.0  # monotonic
        self._drain_error: InflightError | None = None  # error for requests ended by a drain
        self._all_answered = threading.Condition(self._lock)
        # A lock held while a response is delivered, so that no response is delivered after the error of
        # `fail_all`.
        self._delivering = threading.RLock()

    # ---------------------------------------------------------------- for front ends, any thread

    def describe(self) -> EngineDescription:
        """Return the engine's description; raises Unavailable after the engine has failed or ended."""
        self._check_available()
        return self._description

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        """Queue `request` and return its handle.

        A request that wants a receipt is not fetched before the model's files have digests.

        Raises Unavailable after `fail_all`, after `refuse` unless the request is a continuation, while the engine
        sleeps, if too many adapter weights wait to be stored, or if the model's files have no digests.
        """
        if request.output.return_receipt:
            if self._receipts is None:
                raise Unsupported("this engine makes no receipts")
            self._receipts.prepare()
        with self._lock:
            if self._refuses_all or not request.is_continuation:
                self._check_available()
            self._sleep.check_awake(request.is_continuation)
            request_id = next(self._ids)
            if request.lora is not None and request.lora.weights is not None and self._adapters is not None:
                self._adapters.expect_weights(request_id, request.lora.num_bytes)
            if request.may_be_continued:
                self._to_be_continued.add(request_id)
            self._targets[request_id] = ResponseTarget(
                on_response, self._access_log.enter(request, request_id)
            )
            if request.output.return_receipt:
                self._with_receipt.add(request_id)
            self._queue[request_id] = replace(
                request, request_id=request_id, arrival_time_ns=time.monotonic_ns()
            )
        self._notify()
        return RequestHandle(request_id, self.stop)

    def reserve_id(self) -> int:
        """Return an id that no request has or will have."""
        return next(self._ids)

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """Stop a request, or one of its sequences.

        A request that the batcher has not fetched yet ends without tokens and is never fetched.
        """
        with self._lock:
            waiting = self._queue.pop(request_id, None) if sequence_index is None else None
            if waiting is not None:
                self._stopped_in_queue[request_id] = ended_before_start(
                    waiting, FINISH_REASON_OF_STOP[reason]
                )
                if waiting.lora is not None and self._adapters is not None:
                    self._adapters.give_up_weights(request_id)
            elif request_id in self._targets and request_id not in self._stopped_in_queue:
                self._stop_signals.append(StopSignal(request_id, reason, sequence_index, time.monotonic_ns()))
            else:
                return
        self._notify()

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        """Register a function that waits for a front end's unsent responses; see `wait_until_sent`."""
        self._outboxes += (wait_until_sent,)

    def state(self, timeout_s: float) -> str:
        """Return the state of this client's queue and of the batcher as JSON; waits at most `timeout_s` seconds.

        Raises Unavailable once the batcher's loop has ended, Unsupported if it does not report its state.
        """
        if self._read_state is None:
            raise Unsupported("this engine does not report its state")
        batcher = json.loads(self._read_state(timeout_s))
        with self._lock:
            in_front = {"queued_requests": len(self._queue), "unanswered_requests": len(self._targets)}
        return json.dumps({**in_front, "batcher": batcher})

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Execute a command on this thread, and return the state of all adapters after it.

        Raises Unavailable if the engine has ended or reading an adapter takes longer than `timeout_s`
        seconds, Unsupported if the engine takes no adapter commands, and the command's own error if it
        fails.
        """
        self._check_available()
        if self._adapters is None:
            raise Unsupported("this engine does not accept adapter commands")
        if command.action is AdapterAction.LOAD:
            self._adapters.load(command.name, command.path, timeout_s, command.replaces)
        elif command.action is AdapterAction.UNLOAD:
            self._adapters.unload(command.name, command.task_id)
        return tuple(self._adapters.list_adapters())

    def sleep(self, action: SleepAction, timeout_s: float, only_weights: bool = False) -> bool:
        """Carry out a command about the engine's sleep; return whether the engine sleeps or is falling asleep.

        The command runs on this thread. Raises Unavailable if the engine has ended, and as `Sleep.carry_out`.
        """
        self._check_available()
        return self._sleep.carry_out(action, timeout_s, only_weights)

    def _finish_requests(self, timeout_s: float, then: Callable[[], None]) -> bool:
        with self._lock:
            have_finished = self._wait_for_all(timeout_s)
            if have_finished:
                then()
            return have_finished

    def _cancel_requests(self) -> None:
        with self._lock:
            unanswered = list(self._targets)
        for request_id in unanswered:
            self.stop(request_id, StopReason.CANCELLED)

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the reports since the last call, even after the batcher has ended."""
        return Reports() if self._read_reports is None else self._read_reports(kind, timeout_s)

    def refuse(self, error: InflightError) -> None:
        """Make later submits raise Unavailable. Accepted requests and their continuations are still served."""
        with self._lock:
            self._refusal = self._refusal or str(error)

    def drain(self, timeout_s: float, why: str = _SHUTTING_DOWN) -> None:
        """Refuse new requests and wait until all others are answered.

        After `timeout_s`, end them with Unavailable.

        A request that is answered in rounds may run until its last round. Returns when all requests have
        their final response, at most five seconds after `timeout_s`: if the loop has not ended the requests
        by then, it hangs, and this method answers them. Must not be called on the loop thread.

        Args:
            timeout_s: How many seconds requests may continue.
            why: The error message for requests that are refused or ended.
        """
        self._end_requests(timeout_s, Unavailable(why))
        with self._delivering:  # the last request has its access line
            self._access_log.flush()

    def _end_requests(self, timeout_s: float, error: InflightError) -> None:
        self.refuse(error)
        with self._lock:
            if self._wait_for_all(timeout_s):
                return
            self._drain_error, self._refuses_all = error, True
            late = list(self._targets)
        for request_id in late:
            self.stop(request_id, StopReason.CANCELLED)
        with self._lock:
            if self._all_answered.wait_for(lambda: not self._targets, _PATIENCE_S):
                return
            num_unanswered = len(self._targets)
        _log.error("the generation loop hangs; %d requests are answered without it", num_unanswered)
        self.fail_all(error)

    def fail_all(self, error: InflightError) -> None:
        """Answer every unanswered request with `error`, and make later submits raise Unavailable.

        Any thread. Later responses of the loop to these requests are dropped.
        """
        self.refuse(error)
        with self._delivering, self._lock:
            self._refuses_all = True
            self._to_be_continued.clear()
            unanswered = list(self._targets.items())
            self._targets.clear()
            self._queue.clear()
            self._with_receipt.clear()
            self._stopped_in_queue.clear()
            self._stop_signals.clear()
            self._all_answered.notify_all()
        for request_id, target in unanswered:
            self._deliver(target, Response(request_id, error=error, is_final=True))

    def close(self) -> None:
        """Answer unanswered requests with Unavailable, after the loop has ended or if it hangs. Idempotent."""
        self.fail_all(Unavailable(_SHUTTING_DOWN))
        self._access_log.close()

    def _wait_for_all(self, timeout_s: float) -> bool:
        """Wait until all requests are answered and no continuation is expected; return False after the timeout.

        The caller holds the lock.
        """
        end_s = time.monotonic() + timeout_s
        while self._all_answered.wait_for(lambda: not self._targets, max(0.0, end_s - time.monotonic())):
            now_s = time.monotonic()
            gap_s = min(self._continued_until_s, end_s) - now_s
            if gap_s <= 0:
                return True
            self._all_answered.wait(gap_s)
        return False

    def _check_available(self) -> None:
        if self._refusal is not None:
            raise Unavailable(self._refusal)

    # ---------------------------------------------------------------- the batcher's callbacks, on its thread

    def get_inference_requests(self, max_num: int) -> list[Request]:
        """Return the requests that have waited longest, at most `max_num`; a negative number means no limit.

        Together they have at most SEQUENCES_PER_ITERATION sequences (long prompts count as several), unless
        the first request alone has more. Also delivers the responses of requests that were stopped before
        they were fetched, at most as many sequences.
        """
        with self._lock:
            ended = _take_first(self._stopped_in_queue, -1, len)
            requests = self._take_requests(max_num)
            has_more_ended = bool(self._stopped_in_queue)
        for response in itertools.chain.from_iterable(ended):
            self.send_response(response)
        if has_more_ended:
            self._notify()
        return requests

    def _take_requests(self, max_num: int) -> list[Request]:
        """Take requests from the queue, but none whose receipt cannot be made yet. The caller holds the lock."""
        if not self._with_receipt or self._receipts is None or self._receipts.is_ready:
            return _take_first(self._queue, max_num, _cost)
        ready = {each: request for each, request in self._queue.items() if each not in self._with_receipt}
        taken = _take_first(ready, max_num, _cost)
        for request in taken:
            del self._queue[request.request_id]
        return taken

    def poll_stop_signals(self) -> list[StopSignal]:
        """Return the stop signals since the last call, for requests that the batcher has fetched."""
        with self._lock:
            signals, self._stop_signals = self._stop_signals, []
        return signals

    def send_response(self, response: Response) -> None:
        """Pass a response to its request's callback, and remove the callback after the final response."""
        with self._delivering:
            self._pass_to_callback(response)
        if response.is_final:
            with self._lock:
                if not self._targets:
                    self._all_answered.notify_all()

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds until this process's front ends have sent all responses.

        Returns whether they have. Front ends in other processes are not included.
        """
        end_s = time.monotonic() + timeout_s
        return all(wait(max(0.0, end_s - time.monotonic())) for wait in self._outboxes)

    def _expect_continuation(self, response: Response) -> None:
        """Note that another round of the request is expected, if it has rounds. The caller holds the lock."""
        if response.request_id in self._to_be_continued:
            self._to_be_continued.remove(response.request_id)
            if response.result is not None and response.result.finish_reasons[0] is FinishReason.LENGTH:
                self._continued_until_s = time.monotonic() + _BETWEEN_ROUNDS_S

    def _pass_to_callback(self, response: Response) -> None:
        with self._lock:
            if response.is_final:
                target = self._targets.pop(response.request_id, None)
                self._expect_continuation(response)
                has_receipt = response.request_id in self._with_receipt
                self._with_receipt.discard(response.request_id)
            else:
                target, has_receipt = self._targets.get(response.request_id), False
            drain_error = self._drain_error
        if target is None:
            return
        if drain_error is not None and response.result and response.result.was_cut_short:
            if not response.is_final:
                return  # the last response of one sequence; the error is the request's final response
            response = replace(response, result=None, error=drain_error)
        self._deliver(target, self._with_part(response) if has_receipt else response)

    def _with_part(self, response: Response) -> Response:
        """Return a request's last response with the engine's part of its receipt."""
        if self._receipts is None or response.result is None or not self._receipts.is_ready:
            return response  # a request that ended before it was fetched needs no digests
        digest = b"" if response.ending is None else response.ending.adapter_digest
        try:
            return replace(response, result=replace(response.result, receipt=self._receipts.part(digest)))
        except Unavailable as error:
            return replace(response, result=None, error=error)

    def _deliver(self, target: ResponseTarget, response: Response) -> None:
        target.take(response)
        if response.is_final:
            self._access_log.leave(target.entry, response)


def _cost(request: Request) -> int:
    """Return the cost of fetching a request, in sequences.

    Long prompts cost more, as every sequence copies them.
    """
    return request.sampling.num_sequences * (1 + request.prompt_length // _TOKENS_OF_A_SEQUENCE)


def _take_first(
    waiting: dict[int, _Waiting], max_num: int, num_sequences: Callable[[_Waiting], int]
) -> list[_Waiting]:
    """Take the first entries with at most SEQUENCES_PER_ITERATION sequences: at most `max_num` unless negative."""
    taken: list[int] = []
    total = 0
    for request_id, each in waiting.items():
        total += num_sequences(each)
        if len(taken) == max_num or (taken and total > SEQUENCES_PER_ITERATION):
            break
        taken.append(request_id)
    return [waiting.pop(request_id) for request_id in taken]
