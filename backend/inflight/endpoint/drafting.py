"""An EngineClient over two engines: a draft model proposes tokens, and the target model verifies them.

A `DraftedRequest` is answered in rounds. In each, the draft engine generates a few tokens behind all that are
known, and the target engine verifies these in one pass, which gives those it accepts and one more. Both are asked
by ordinary requests, and find the KV blocks of the rounds before by content. Every other request goes to the
target engine as it is. Does not know texts, nor a protocol.

Requests between rounds belong to one thread, which begins rounds and hands responses on. Whatever happens to them
elsewhere (responses on the engines' threads, `submit` and `stop` on any) comes to it by a queue. Nothing waits for
an engine that computes; but while an engine's socket takes no connection or no bytes, the thread waits in the
client's `submit`, some seconds at most, and with it all drafted requests. Other requests do not pass through it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from inflight.core.ports import EngineClient, SendResponseCallback, WaitUntilSent
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import (
    EngineDescription,
    ExternalDraft,
    FloatTensor,
    ModelLimits,
    OutputConfig,
    Request,
)
from inflight.core.request.response import PerfMetrics, Response, Result
from inflight.core.request.results import ended_before_start
from inflight.core.request.sampling_config import DRAWING, SamplingConfig
from inflight.core.request.stop import CUT_SHORT, FINISH_REASON_OF_STOP, FinishReason, StopReason
from inflight.errors import InflightError, StepFailed, Unavailable, without_places

_log = logging.getLogger(__name__)
_NS_PER_MS = 1_000_000
_DRAFT_SEED = 0x5DEECE66D
"""Bits by which the seed of weighed drafts differs from their request's."""

_Job = Callable[[], None]


class DraftingClient:
    """An `EngineClient` whose requests may be drafted for; it closes both clients that it is given.

    Args:
        target: Of the model whose tokens clients get.
        draft: Of the model that proposes tokens, of the same tokenizer. Vocabularies may be padded to different
            sizes.
    """

    def __init__(self, target: EngineClient, draft: EngineClient) -> None:
        self._target, self._draft = target, draft
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._drafted: dict[int, _Drafted] = {}  # by the ids that `submit` returned
        self._thread = threading.Thread(target=self._run, name="inflight-drafting", daemon=True)
        self._thread.start()

    def describe(self) -> EngineDescription:
        """The target engine's description; raises Unavailable while it cannot be reached."""
        return self._target.describe()

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        """Queue `request`; raises Unavailable if an engine that it needs cannot be reached."""
        if not isinstance(request, DraftedRequest):
            return self._target.submit(request, on_response)
        limits = self._target.describe().limits
        try:
            draft_limits = self._draft.describe().limits
        except Unavailable as error:
            raise Unavailable(f"num_draft_tokens needs the draft model: {error}") from error
        request_id = self._target.reserve_id()

        def respond(response: Response) -> None:
            if response.is_final:
                with self._lock:
                    del self._drafted[request_id]
            try:
                on_response(replace(response, request_id=request_id))
            except Exception:  # one request's fault must not end the thread of all
                _log.exception("a front end failed to take a response of request %d", request_id)

        engines = _EngineSide(self._target, limits), _EngineSide(self._draft, draft_limits)
        drafted = _Drafted(request, engines, respond, self._jobs.put)
        with self._lock:
            self._drafted[request_id] = drafted
        self._jobs.put(drafted.begin_round)
        return RequestHandle(request_id, self.stop)

    def reserve_id(self) -> int:
        """An id that no request will run under."""
        return self._target.reserve_id()

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """End a request early, or one of its sequences; unknown ids are ignored."""
        with self._lock:
            drafted = self._drafted.get(request_id)
        if drafted is None:
            self._target.stop(request_id, reason, sequence_index)
        else:
            self._jobs.put(lambda: drafted.stop(reason))

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        """Register a front end's unsent responses with the target engine."""
        self._target.add_outbox(wait_until_sent)

    def state(self, timeout_s: float) -> str:
        """The target engine's state, as JSON."""
        return self._target.state(timeout_s)

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Have the target engine carry a command out; returns all of its adapters."""
        return self._target.adapters(command, timeout_s)

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """The reports that the target engine has kept since the last call."""
        return self._target.reports(kind, timeout_s)

    def close(self) -> None:
        """End both clients; requests in flight are answered with Unavailable. Idempotent."""
        # Both answer all that is in flight. What begins another round then learns that it cannot.
        self._draft.close()
        self._target.close()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True)
class _EngineSide:
    """One of the two, and what it can take."""

    client: EngineClient
    limits: ModelLimits


class _Drafted:
    """One request from round to round. Belongs to the drafting thread.

    Args:
        request: What was asked.
        engines: The target's, and the draft model's.
        respond: Takes its responses; their id does not matter.
        put: Has the drafting thread do something.
    """

    def __init__(
        self,
        request: DraftedRequest,
        engines: tuple[_EngineSide, _EngineSide],
        respond: SendResponseCallback,
        put: Callable[[_Job], None],
    ) -> None:
        self._request = request
        self._target, self._draft = engines
        self._respond, self._put = respond, put
        self._known = request.input_token_ids
        self._arrival_ns = time.monotonic_ns()
        self._running: RequestHandle | None = None
        self._stop: StopReason | None = None
        self._has_ended = False
        self._so_far = _Totals(self._arrival_ns)

    def begin_round(self) -> None:
        """Have the next tokens drafted; where there is no room for drafts, have the target go on alone."""
        self._running = None
        try:
            self._begin_round()
        except InflightError as error:
            self._fail(error)
        except Exception as error:  # a bug that one request meets must not end the others
            _log.exception("a round could not be begun")
            self._fail(StepFailed(without_places(f"drafting failed: {error!r}")))

    def stop(self, reason: StopReason) -> None:
        """End it early."""
        self._stop = self._stop or reason
        if self._running is not None:
            self._running.stop(reason)

    def _begin_round(self) -> None:
        if self._stop is not None:
            self._end(FINISH_REASON_OF_STOP[self._stop])
        elif self._request.allotted_time_ms and self._remaining_ms() <= 0:
            self._end(FinishReason.TIMED_OUT)
        elif count := self._num_drafts():
            self._submit(self._draft.client, self._draft_request(count), self._take_draft)
        else:
            self._submit(self._target.client, self._target_request(self._num_to_come), self._take_tokens)

    def _submit(self, client: EngineClient, request: Request, take: SendResponseCallback) -> None:
        self._running = client.submit(request, lambda response: self._put(lambda: self._take(take, response)))

    def _take(self, take: SendResponseCallback, response: Response) -> None:
        try:
            if not self._has_ended:
                take(response)
        except InflightError as error:
            self._fail(error)
        except Exception as error:  # as in `begin_round`
            _log.exception("a round could not be ended")
            self._fail(StepFailed(without_places(f"drafting failed: {error!r}")))

    def _take_draft(self, response: Response) -> None:
        """Have the target verify what the draft model has proposed."""
        result = response.result
        if result is None:
            raise response.error or StepFailed("the draft model gave no result")
        if self._stop is not None or result.finish_reasons[0] in CUT_SHORT:
            stopped = FINISH_REASON_OF_STOP.get(self._stop) if self._stop else None
            self._end(stopped or result.finish_reasons[0])
            return
        draft = self._proposal(result)
        # Behind no draft at all, as where the draft model would end here, the target says what comes next.
        request = self._target_request(len(draft.token_ids) + 1, draft if draft.token_ids else None)
        self._submit(self._target.client, request, self._take_tokens)

    def _take_tokens(self, response: Response) -> None:
        """Hand the target's tokens on, and begin the next round behind the last of them."""
        result = response.result
        if result is None:
            raise response.error or StepFailed("the engine gave no result")
        self._known += result.output_token_ids[0]
        reason, goes_on = result.finish_reasons[0], False
        if response.is_final and reason is FinishReason.LENGTH and self._num_to_come > 0:
            goes_on = self._stop is None
            reason = FINISH_REASON_OF_STOP[self._stop] if self._stop else FinishReason.NOT_FINISHED
        result = self._so_far.add(
            replace(
                result,
                num_input_tokens=self._request.prompt_length,
                finish_reasons=(reason,),
                is_sequence_final=result.is_sequence_final and not goes_on,
            ),
            response.is_final,
        )
        is_final = response.is_final and not goes_on
        if is_final or result.output_token_ids[0]:
            self._send(Response(0, result, is_final=is_final))
        if goes_on:
            self.begin_round()

    def _end(self, reason: FinishReason) -> None:
        """End it without further tokens."""
        (response,) = ended_before_start(self._request.plain(), reason)
        assert response.result is not None, "it is made of one"
        self._send(Response(0, self._so_far.add(response.result, True), is_final=True))

    def _fail(self, error: InflightError) -> None:
        self._send(Response(0, error=error, is_final=True))
        self.stop(StopReason.CANCELLED)  # what may still run works for nobody

    def _send(self, response: Response) -> None:
        self._has_ended = response.is_final
        self._respond(response)

    # ---------------------------------------------------------------- what a round asks for

    @property
    def _num_to_come(self) -> int:
        return self._request.max_sequence_length - len(self._known)

    def _remaining_ms(self) -> int:
        return self._request.allotted_time_ms - (time.monotonic_ns() - self._arrival_ns) // _NS_PER_MS

    def _num_drafts(self) -> int:
        """How many tokens to draft; 0 where one of the engines has no room for a round."""
        length, target, draft = len(self._known), self._target.limits, self._draft.limits
        count = min(
            self._request.num_draft_tokens,
            self._num_to_come - 1,
            target.max_context_tokens - length,
            draft.room(length),
        )
        is_last = count + 1 >= self._num_to_come
        # The next round's prompt is this one's with what it gave.
        fits = length <= draft.max_input_length and (is_last or length + count + 1 <= target.max_input_length)
        return max(0, count) if fits and max(self._known) < draft.vocab_size else 0

    def _common(self) -> dict[str, Any]:
        """The arguments that requests to both engines share.

        Those of later rounds go before others of their priority, which have not begun: what runs is not to wait
        behind them. As continuations they are refused neither for a full queue nor while the engine drains.
        """
        request, num_generated = self._request, len(self._known) - self._request.prompt_length
        sampling = request.sampling
        return {
            "input_token_ids": self._known,
            "priority": math.nextafter(request.priority, 1.0) if num_generated else request.priority,
            "sampling": replace(sampling, min_length=max(0, sampling.min_length - num_generated)),
            "stop_words_after": max(0, request.stop_words_after - num_generated),
            "is_continuation": num_generated > 0,
            "allotted_time_ms": max(1, self._remaining_ms()) if self._request.allotted_time_ms else 0,
        }

    def _target_request(self, max_new_tokens: int, draft: ExternalDraft | None = None) -> Request:
        return self._request.plain(
            **self._common(),
            max_new_tokens=max_new_tokens,
            may_be_continued=max_new_tokens < self._num_to_come or draft is not None,
            streaming=True,
            draft=draft,
        )

    def _draft_request(self, count: int) -> Request:
        """Asks for the likeliest guess, or where the target weighs logits, for a draw from what they say."""
        request, common = self._request, self._common()
        output = OutputConfig(
            exclude_input_from_output=True, return_generation_logits=request.use_draft_logits
        )
        changes = {**common, "max_new_tokens": count, "streaming": False, "output": output}
        changes["may_be_continued"] = True
        # Weighed is every token that the draft model draws: an end id is one like any other.
        vocab_size = 0 if self._weighs else self._draft.limits.vocab_size
        changes["end_ids"] = tuple(end_id for end_id in request.end_ids if end_id < vocab_size)
        if self._weighs or self._draft.limits.vocab_size != self._target.limits.vocab_size:
            # Ids and rows of the target's vocabulary may mean nothing to the draft model.
            changes |= {
                "sampling": self._plain_sampling(common["sampling"]),
                "bad_words": (),
                "embedding_bias": None,
            }
        return request.plain(**changes)

    @property
    def _weighs(self) -> bool:
        """Whether drafts are accepted by chance: then they must have been drawn from what their logits say."""
        return self._request.use_draft_logits and not self._request.sampling.greedy

    def _plain_sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        if self._weighs:
            # Where the target draws itself, its number must not be the one that the draft came from.
            seed = sampling.random_seed ^ _DRAFT_SEED
            return SamplingConfig(temperature=sampling.temperature, top_p=1.0, random_seed=seed)
        names = ("temperature", *DRAWING, "random_seed")
        return SamplingConfig(**{name: getattr(sampling, name) for name in names})

    def _proposal(self, result: Result) -> ExternalDraft:
        """The draft as the target takes it: ids of its vocabulary, and logits as wide as that."""
        vocab_size, token_ids = self._target.limits.vocab_size, result.output_token_ids[0]
        known = next((at for at, token_id in enumerate(token_ids) if token_id >= vocab_size), len(token_ids))
        logits = None
        if self._request.use_draft_logits and result.generation_logits:
            temperature = self._request.sampling.temperature if self._weighs else 1.0
            logits = _fit(result.generation_logits[0], known, vocab_size, temperature)
        return ExternalDraft(token_ids[:known], logits, ends_sequence=True)


class _Totals:
    """Totals of the rounds so far, for values that a response gives for the whole sequence."""

    def __init__(self, arrival_ns: int) -> None:
        self._arrival_ns = arrival_ns
        self._cum_log_prob = 0.0
        self._num_iterations = 0
        self._metrics: PerfMetrics | None = None

    def add(self, result: Result, ends_round: bool) -> Result:
        """The result of a round as one of the whole sequence."""
        log_probs = result.cum_log_probs
        summed = None if log_probs is None else (self._cum_log_prob + log_probs[0],)
        num_iterations = self._num_iterations + result.num_iterations
        metrics = _joined(self._metrics, result.perf_metrics)
        if ends_round:
            self._cum_log_prob = summed[0] if summed else 0.0
            self._num_iterations, self._metrics = num_iterations, metrics
        if metrics is not None:
            last_ns = metrics.last_token_time_ns if result.is_sequence_final else 0
            metrics = replace(metrics, arrival_time_ns=self._arrival_ns, last_token_time_ns=last_ns)
        return replace(result, cum_log_probs=summed, num_iterations=num_iterations, perf_metrics=metrics)


def _joined(before: PerfMetrics | None, now: PerfMetrics | None) -> PerfMetrics | None:
    """Metrics of a sequence from those of its rounds; blocks are those of its prompt."""
    if before is None or now is None:
        return now
    return replace(
        before,
        first_scheduled_time_ns=before.first_scheduled_time_ns or now.first_scheduled_time_ns,
        first_token_time_ns=before.first_token_time_ns or now.first_token_time_ns,
        last_token_time_ns=now.last_token_time_ns or before.last_token_time_ns,
        num_draft_tokens=before.num_draft_tokens + now.num_draft_tokens,
        num_accepted_draft_tokens=before.num_accepted_draft_tokens + now.num_accepted_draft_tokens,
        last_iteration=now.last_iteration or before.last_iteration,
    )


def _fit(logits: FloatTensor, num_rows: int, vocab_size: int, temperature: float) -> FloatTensor:
    """The first rows, divided by the temperature; tokens that the draft model does not have are never drawn."""
    rows = np.frombuffer(logits.data, np.float32).reshape(logits.shape)[:num_rows]
    fitted = np.full((num_rows, vocab_size), -np.inf, np.float32)
    width = min(vocab_size, rows.shape[1])
    fitted[:, :width] = rows[:, :width] / np.float32(temperature)
    return FloatTensor(fitted.shape, fitted.tobytes())
