"""An EngineClient over two engines: a draft model proposes tokens, and the target model verifies them.

A `DraftedRequest` is answered in rounds. In each round the draft engine generates a few tokens that continue
the known tokens, and the target engine verifies them in one forward pass, which returns the accepted tokens
and one more. Both engines get ordinary requests, and reuse the KV blocks of earlier rounds by prefix
caching. All other requests go to the target engine unchanged.

One thread, the drafting thread, owns the state of drafted requests, starts rounds and passes responses on.
Events on other threads (responses of the engines, `submit` and `stop`) reach it through a queue. It never
waits for an engine's computation; but if an engine's socket accepts no connection or no bytes, it blocks in
the client's `submit` for some seconds at most, and all drafted requests wait. Other requests do not use this
thread.
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

from inflight.access_log import AccessLog
from inflight.core.ports import EngineClient, SendResponseCallback, WaitUntilSent
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.response import PerfMetrics, Response, SequenceResult
from inflight.core.request.results import ended_before_start
from inflight.core.request.sampling_config import DRAWING, SamplingConfig
from inflight.core.request.sleep import SleepAction
from inflight.core.request.stop import CUT_SHORT, FINISH_REASON_OF_STOP, FinishReason, StopReason
from inflight.endpoint.delivery import pass_on
from inflight.errors import InflightError, Name, StepFailed, Unavailable, Unsupported, without_places

_log = logging.getLogger(__name__)
_NS_PER_MS = 1_000_000
_DRAFT_SEED = 0x5DEECE66D
"""XORed with a request's seed to get the seed of its sampled drafts."""

_Job = Callable[[], None]


class DraftingClient:
    """An `EngineClient` over a target engine and a draft engine. It owns and closes both clients.

    Args:
        target: The client of the model whose tokens are returned.
        draft: The client of the model that proposes tokens. Both models must have the same tokenizer; their
            vocabularies may be padded to different sizes.
    """

    def __init__(self, target: EngineClient, draft: EngineClient) -> None:
        self._target, self._draft = target, draft
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._drafted: dict[int, _Drafted] = {}  # by the ids that `submit` returned
        self._access_log = AccessLog()
        self._thread = threading.Thread(target=self._run, name="inflight-drafting", daemon=True)
        self._thread.start()

    def describe(self) -> EngineDescription:
        """Return the target engine's description; raises Unavailable if it cannot be reached."""
        return self._target.describe()

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        """Queue `request`; raises Unavailable if a required engine cannot be reached."""
        if not isinstance(request, DraftedRequest):
            return self._target.submit(request, on_response)
        limits = self._target.describe().limits
        try:
            draft_limits = self._draft.describe().limits
        except Unavailable as error:
            raise Unavailable(Name("num_draft_tokens"), " needs the draft model: ", *error.args) from error
        request_id = self._target.reserve_id()
        take = self._access_log.follow(request, request_id, on_response)

        def respond(response: Response) -> None:
            if response.is_final:
                with self._lock:
                    del self._drafted[request_id]
            pass_on(replace(response, request_id=request_id), take, request.log_extra)

        engines = _EngineSide(self._target, limits), _EngineSide(self._draft, draft_limits)
        drafted = _Drafted(request, engines, respond, self._jobs.put)
        with self._lock:
            self._drafted[request_id] = drafted
        self._jobs.put(drafted.begin_round)
        return RequestHandle(request_id, self.stop)

    def reserve_id(self) -> int:
        """Return an id that no request has or will have."""
        return self._target.reserve_id()

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """End a request, or one of its sequences, early; unknown ids are ignored."""
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
        """Return the target engine's state as JSON."""
        return self._target.state(timeout_s)

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Send a command to the target engine, and return the state of all of its adapters."""
        return self._target.adapters(command, timeout_s)

    def sleep(self, action: SleepAction, timeout_s: float, only_weights: bool = False) -> bool:
        """Raise Unsupported, because the engine that drafts would stay awake."""
        raise Unsupported("two engines serve this model, and cannot sleep")

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the target engine's reports since the last call."""
        return self._target.reports(kind, timeout_s)

    def close(self) -> None:
        """Close both clients; requests in flight get Unavailable. Idempotent."""
        # Closing answers all requests in flight; a request that starts another round afterwards fails.
        self._draft.close()
        self._target.close()
        self._jobs.put(None)
        self._thread.join()
        self._access_log.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(frozen=True, slots=True)
class _EngineSide:
    """One of the two engines: its client and its limits."""

    client: EngineClient
    limits: ModelLimits


class _Drafted:
    """One drafted request over all its rounds. Used on the drafting thread only.

    Args:
        request: The client's request.
        engines: The target engine and the draft engine.
        respond: Function that takes the request's responses; it ignores their request id.
        put: Function that queues a function to run on the drafting thread.
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
        """Submit a request for drafts; if no draft tokens fit, let the target engine generate the rest alone."""
        self._running = None
        try:
            self._begin_round()
        except InflightError as error:
            self._fail(error)
        except Exception as error:  # an unexpected error of one request must not end the others
            _log.exception("a round could not be begun", extra=self._request.log_extra)
            self._fail(StepFailed(without_places(f"drafting failed: {error!r}")))

    def stop(self, reason: StopReason) -> None:
        """End the request with the tokens that it has, at once or when its current round stops."""
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
            _log.exception("a round could not be ended", extra=self._request.log_extra)
            self._fail(StepFailed(without_places(f"drafting failed: {error!r}")))

    def _take_draft(self, response: Response) -> None:
        """Submit the draft model's tokens to the target engine for verification."""
        result = response.result
        if result is None:
            raise response.error or StepFailed("the draft model gave no result")
        if self._stop is not None or result.finish_reasons[0] in CUT_SHORT:
            stopped = FINISH_REASON_OF_STOP.get(self._stop) if self._stop else None
            self._end(stopped or result.finish_reasons[0])
            return
        draft = self._proposal(result)
        # The draft is empty if the draft model ends the text here; the target then generates the next token.
        request = self._target_request(len(draft.token_ids) + 1, draft if draft.token_ids else None)
        self._submit(self._target.client, request, self._take_tokens)

    def _take_tokens(self, response: Response) -> None:
        """Pass the target's tokens to the client, and start the next round."""
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
        """End the request without further tokens."""
        (response,) = ended_before_start(self._request.plain(), reason)
        assert response.result is not None, "ended_before_start gives a result"
        self._send(Response(0, self._so_far.add(response.result, True), is_final=True))

    def _fail(self, error: InflightError) -> None:
        self._send(Response(0, error=error, is_final=True))
        self.stop(StopReason.CANCELLED)  # end a request that may still run on an engine

    def _send(self, response: Response) -> None:
        self._has_ended = response.is_final
        self._respond(response)

    # ---------------------------------------------------------------- requests of a round

    @property
    def _num_to_come(self) -> int:
        return self._request.max_sequence_length - len(self._known)

    def _remaining_ms(self) -> int:
        return self._request.allotted_time_ms - (time.monotonic_ns() - self._arrival_ns) // _NS_PER_MS

    def _num_drafts(self) -> int:
        """Return how many tokens to draft; 0 if a round would exceed the limits of one of the engines."""
        length, target, draft = len(self._known), self._target.limits, self._draft.limits
        count = min(
            self._request.num_draft_tokens,
            self._num_to_come - 1,
            target.draft_room(length),
            draft.room(length),
        )
        is_last = count + 1 >= self._num_to_come
        # The next round's prompt also has this round's tokens.
        fits = is_last or length + count + 1 <= target.max_input_length
        return max(0, count) if fits and max(self._known) < draft.vocab_size else 0

    def _common(self) -> dict[str, Any]:
        """Return the arguments that the requests to both engines share.

        Requests of later rounds are continuations: they start before requests of equal priority that have
        not started, and are accepted even if the queue is full or the server is draining.
        """
        request, num_generated = self._request, len(self._known) - self._request.prompt_length
        sampling = request.sampling
        return {
            "origin": None,  # the client's request gets one access line, and its rounds none
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
        """Return a request to the draft engine: sampled if the target uses rejection sampling, else greedy."""
        request, common = self._request, self._common()
        output = OutputOptions(
            exclude_input_from_output=True, return_generation_logits=request.use_draft_logits
        )
        changes = {**common, "max_new_tokens": count, "streaming": False, "output": output}
        changes["may_be_continued"] = True
        # With rejection sampling, a sampled end id is a draft token like any other.
        vocab_size = 0 if self._samples_drafts else self._draft.limits.vocab_size
        changes["end_ids"] = tuple(end_id for end_id in request.end_ids if end_id < vocab_size)
        if self._samples_drafts or self._draft.limits.vocab_size != self._target.limits.vocab_size:
            # Token ids beyond the draft model's vocabulary, and biases of the target's size, are not valid
            # for the draft model.
            changes |= {
                "sampling": self._plain_sampling(common["sampling"]),
                "bad_words": (),
                "embedding_bias": None,
            }
        return request.plain(**changes)

    @property
    def _samples_drafts(self) -> bool:
        """Return whether the target uses rejection sampling, for which drafts must be sampled, with logits."""
        return self._request.use_draft_logits and not self._request.sampling.greedy

    def _plain_sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        if self._samples_drafts:
            # The target must not sample with the random numbers that chose the draft.
            seed = sampling.random_seed ^ _DRAFT_SEED
            return SamplingConfig(temperature=sampling.temperature, top_p=1.0, random_seed=seed)
        names = ("temperature", *DRAWING, "random_seed")
        return SamplingConfig(**{name: getattr(sampling, name) for name in names})

    def _proposal(self, result: SequenceResult) -> ExternalDraft:
        """Convert a draft to the target's vocabulary; its logits get the shape [tokens, target vocab_size]."""
        vocab_size, token_ids = self._target.limits.vocab_size, result.output_token_ids[0]
        known = next((at for at, token_id in enumerate(token_ids) if token_id >= vocab_size), len(token_ids))
        logits = None
        if self._request.use_draft_logits and result.generation_logits:
            temperature = self._request.sampling.temperature if self._samples_drafts else 1.0
            logits = _fit(result.generation_logits[0], known, vocab_size, temperature)
        return ExternalDraft(token_ids[:known], logits, ends_sequence=True)


class _Totals:
    """Totals over all rounds so far of the values that a response reports for the whole sequence."""

    def __init__(self, arrival_ns: int) -> None:
        self._arrival_ns = arrival_ns
        self._cum_log_prob = 0.0
        self._num_iterations = 0
        self._metrics: PerfMetrics | None = None

    def add(self, result: SequenceResult, ends_round: bool) -> SequenceResult:
        """Add a round's result to the totals; return it with the values for the whole sequence."""
        log_probs = result.cum_log_probs
        summed = None if log_probs is None else (self._cum_log_prob + log_probs[0],)
        num_iterations = self._num_iterations + result.num_iterations
        metrics = _merged(self._metrics, result.perf_metrics)
        if ends_round:
            self._cum_log_prob = summed[0] if summed else 0.0
            self._num_iterations, self._metrics = num_iterations, metrics
        if metrics is not None:
            last_ns = metrics.last_token_time_ns if result.is_sequence_final else 0
            metrics = replace(metrics, arrival_time_ns=self._arrival_ns, last_token_time_ns=last_ns)
        return replace(result, cum_log_probs=summed, num_iterations=num_iterations, perf_metrics=metrics)


def _merged(before: PerfMetrics | None, now: PerfMetrics | None) -> PerfMetrics | None:
    """Combine a sequence's metrics with the metrics of one more round.

    Block counts are kept from the first round.
    """
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
    """Return the first rows of logits divided by the temperature, [num_rows, vocab_size], padded with -inf."""
    rows = np.frombuffer(logits.data, np.float32).reshape(logits.shape)[:num_rows]
    fitted = np.full((num_rows, vocab_size), -np.inf, np.float32)
    width = min(vocab_size, rows.shape[1])
    fitted[:, :width] = rows[:, :width] / np.float32(temperature)
    return FloatTensor(fitted.shape, fitted.tobytes())
