"""How requests end: deadlines, the last response of each sequence, and the release of slots and blocks.

A sequence that has ended keeps its slots and blocks until none of its rows is in flight; they are released before
its last response is made. A request is forgotten with its last sequence. Used by the scheduler and
`outcomes.py`, on the loop thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from inflight.core.report.metrics import Observations
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.request.response import RequestEnding, Response
from inflight.core.request.results import make_response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.running import Running
from inflight.errors import InflightError, RequestError, StepFailed, without_places


@dataclass(frozen=True, slots=True)
class Endings:
    """Ends sequences and requests: frees their blocks and slots, and makes their last responses.

    Attributes:
        groups: Requests without a final response, by request id; ended requests are removed here.
        admission: Owns the waiting queue.
        running: The sequences that have slots.
        observed: Counts ended sequences and requests.
    """

    groups: dict[int, RequestGroup]
    admission: Admission
    running: Running
    observed: Observations

    def finish(self, llm_request: LlmRequest, reason: FinishReason, now_ns: int) -> list[Response]:
        """End an unfinished sequence. If its siblings wait for it to compute the prompt, one of them computes
        it."""
        self.admission.waiting.remove(llm_request)
        llm_request.finish(reason)
        if llm_request.leads and not llm_request.group.is_held:
            self.admission.pass_prompt_on(llm_request.group)
        return self.drain(llm_request, now_ns)

    def finish_each(
        self, sequences: Iterable[LlmRequest], reason: FinishReason, now_ns: int
    ) -> list[Response]:
        """End the sequences that have not ended yet."""
        responses: list[Response] = []
        for llm_request in sequences:
            if llm_request.state is not RequestState.FINISHED:
                responses += self.finish(llm_request, reason, now_ns)
        return responses

    def fail(self, group: RequestGroup, error: InflightError, now_ns: int) -> list[Response]:
        """End a request with `error`; its sequences that have already ended keep their finish reasons."""
        responses: list[Response] = []
        for llm_request in group.sequences:
            if llm_request.state is not RequestState.FINISHED:
                group.error = group.error or error
                responses += self.finish(llm_request, FinishReason.NOT_FINISHED, now_ns)
            elif llm_request.slots:
                responses += self.drain(llm_request, now_ns)
        return responses

    def drain(self, llm_request: LlmRequest, now_ns: int) -> list[Response]:
        """If none of an ended sequence's rows is in flight, release its slots and blocks and return its last
        response."""
        if llm_request.num_scheduled_tokens > 0:
            return []
        self.running.leave(llm_request)
        self.admission.waiting.leave(llm_request)
        llm_request.slots = ()
        group = llm_request.group
        group.num_unfinished -= 1
        is_final = group.num_unfinished == 0
        responses = self._respond_last(llm_request, is_final)
        if group.error is None:
            self.observed.sequence_ended(llm_request)
        if is_final:
            del self.groups[llm_request.request_id]
            self.admission.held.pop(llm_request.request_id, None)
            self.observed.request_ended(group, now_ns)
        return responses

    def _respond_last(self, llm_request: LlmRequest, is_final: bool) -> list[Response]:
        group = llm_request.group
        ending = _ending_of(group) if is_final else None
        if group.error is None:
            try:
                return [make_response(llm_request, self.running.block_counts, is_final, ending)]
            except Exception as error:  # other requests must continue, and this one still needs a response
                group.error = as_request_error(error)
        return [Response(llm_request.request_id, None, group.error, True, ending)] if is_final else []


def _ending_of(group: RequestGroup) -> RequestEnding:
    """Return how a request has ended whose sequences have all ended."""
    sequences = group.sequences
    return RequestEnding(
        sum(sequence.num_generated for sequence in sequences),
        tuple(sequence.finish_reason for sequence in sequences),
        min((sequence.first_token_ns for sequence in sequences if sequence.first_token_ns), default=0),
        group.adapter.digest if group.adapter else b"",
        min((each.first_scheduled_ns for each in sequences if each.first_scheduled_ns), default=0),
        max(sequence.last_token_ns for sequence in sequences),
    )


def as_request_error(error: Exception) -> InflightError:
    """Return the error for the client of a request whose processing raised `error`."""
    if isinstance(error, RequestError):
        return error
    return StepFailed(without_places(f"the request could not be processed: {type(error).__name__}: {error}"))


class PendingEndings:
    """Requests and sequences to end because of a client, a deadline or an error, in order of arrival.

    One iteration ends a bounded number of sequences, so that the other requests wait for a bounded time however
    many clients leave at once. Until its turn, a running sequence may continue to generate, but a waiting one
    does not start.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[RequestGroup, int | None, FinishReason | InflightError]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(
        self, group: RequestGroup, why: FinishReason | InflightError, sequence_index: int | None = None
    ) -> None:
        """Add a request, or one of its sequences, to be ended later."""
        if sequence_index is None:
            group.is_to_end = True
        self._queue.append((group, sequence_index, why))

    def end_some(self, endings: Endings, most: int, now_ns: int) -> list[Response]:
        """End up to `most` sequences, or all of one request if it alone has more; a request's sequences end
        together."""
        responses: list[Response] = []
        num_ended = 0
        while self._queue:
            group, index, why = self._queue[0]
            unfinished = group.sequences if index is None else group.sequences[index : index + 1]
            unfinished = [s for s in unfinished if s.state is not RequestState.FINISHED]
            if num_ended and num_ended + len(unfinished) > most:
                break
            self._queue.popleft()
            num_ended += max(1, len(unfinished))  # an entry whose sequences have ended already takes time too
            if isinstance(why, FinishReason):
                responses += endings.finish_each(unfinished, why, now_ns)
            else:
                responses += endings.fail(group, why, now_ns)
        return responses


class Deadlines:
    """Requests by deadline. Entries of ended requests are ignored, and dropped now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestGroup]] = []
        self._drop_at = 64

    def add(self, group: RequestGroup) -> None:
        """Add a request's deadline, if it has one."""
        if not group.deadline_ns:
            return
        heappush(self._heap, (group.deadline_ns, group.sequences[0].key, group))
        if len(self._heap) > self._drop_at:
            self._heap = [entry for entry in self._heap if entry[2].num_unfinished]
            heapify(self._heap)
            self._drop_at = 2 * len(self._heap) + 64

    @property
    def next_ns(self) -> int | None:
        """The earliest deadline, perhaps of a request that has already ended; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_ns: int) -> list[RequestGroup]:
        """Return the unfinished requests whose deadline has passed; each is returned once."""
        expired: list[RequestGroup] = []
        while self._heap and self._heap[0][0] <= now_ns:
            group = heappop(self._heap)[2]
            if group.num_unfinished:
                expired.append(group)
        return expired
