"""How requests end: deadlines, the last response of each sequence, and the release of what it held.

A sequence that has ended keeps slots and blocks until nothing of it is in flight. They are free before its last
response is made. With the last sequence of a request the request itself is forgotten. The scheduler and
`outcomes.py` call this, on the loop thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from inflight.core.report.metrics import Observations
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.request.response import Response
from inflight.core.request.results import make_response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.running import Running
from inflight.errors import InflightError, RequestError, StepFailed, without_places


@dataclass(frozen=True, slots=True)
class Endings:
    """Ends sequences and requests.

    Attributes:
        groups: Requests without a final response, by request id; this object removes those that have had it.
        admission: Has the waiting queue.
        running: The sequences that have slots.
        observed: Counts what ends.
    """

    groups: dict[int, RequestGroup]
    admission: Admission
    running: Running
    observed: Observations

    def finish(self, llm_request: LlmRequest, reason: FinishReason, now_ns: int) -> list[Response]:
        """End a sequence that has not ended. If its request's others wait for its prompt, another computes it."""
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
        """End a request with `error`; its sequences that have ended already keep their reasons."""
        responses: list[Response] = []
        for llm_request in group.sequences:
            if llm_request.state is not RequestState.FINISHED:
                group.error = group.error or error
                responses += self.finish(llm_request, FinishReason.NOT_FINISHED, now_ns)
            elif llm_request.slots:
                responses += self.drain(llm_request, now_ns)
        return responses

    def drain(self, llm_request: LlmRequest, now_ns: int) -> list[Response]:
        """Release what an ended sequence holds once nothing of it is in flight, and make its last response."""
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
        if group.error is None:
            try:
                return [make_response(llm_request, self.running.block_counts, is_final)]
            except Exception as error:  # other requests must not end, and this one not without a response
                group.error = as_request_error(error)
        return [Response(llm_request.request_id, error=group.error, is_final=True)] if is_final else []


def as_request_error(error: Exception) -> InflightError:
    """The error for a request that raised `error` while it was processed."""
    if isinstance(error, RequestError):
        return error
    return StepFailed(without_places(f"the request could not be processed: {type(error).__name__}: {error}"))


class PendingEndings:
    """Requests and sequences that are to end because a client, a deadline or an event says so, first come first.

    An iteration ends some of them: however many clients go away at once, those who stay wait for a bounded time.
    What is still to end may go on generating meanwhile, but does not start any more.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[RequestGroup, int | None, FinishReason | InflightError]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(
        self, group: RequestGroup, why: FinishReason | InflightError, sequence_index: int | None = None
    ) -> None:
        """Let a request end, or one of its sequences."""
        if sequence_index is None:
            group.is_to_end = True
        self._queue.append((group, sequence_index, why))

    def end_some(self, endings: Endings, most: int, now_ns: int) -> list[Response]:
        """End `most` sequences, or all of one request if it has more; those of a request end together."""
        responses: list[Response] = []
        num_ended = 0
        while self._queue:
            group, index, why = self._queue[0]
            meant = group.sequences if index is None else group.sequences[index : index + 1]
            meant = [s for s in meant if s.state is not RequestState.FINISHED]
            if num_ended and num_ended + len(meant) > most:
                break
            self._queue.popleft()
            num_ended += max(1, len(meant))  # one that has ended meanwhile is looked at as well
            if isinstance(why, FinishReason):
                responses += endings.finish_each(meant, why, now_ns)
            else:
                responses += endings.fail(group, why, now_ns)
        return responses


class Deadlines:
    """Requests by deadline. Ended ones need not be removed: they are ignored, and dropped now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestGroup]] = []
        self._drop_at = 64

    def add(self, group: RequestGroup) -> None:
        """Remember a request's deadline, if it has one."""
        if not group.deadline_ns:
            return
        heappush(self._heap, (group.deadline_ns, group.sequences[0].key, group))
        if len(self._heap) > self._drop_at:
            self._heap = [entry for entry in self._heap if entry[2].num_unfinished]
            heapify(self._heap)
            self._drop_at = 2 * len(self._heap) + 64

    @property
    def next_ns(self) -> int | None:
        """The first deadline, maybe of a request that has ended; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_ns: int) -> list[RequestGroup]:
        """The requests whose deadline has come and that have not ended; each is returned once."""
        expired: list[RequestGroup] = []
        while self._heap and self._heap[0][0] <= now_ns:
            group = heappop(self._heap)[2]
            if group.num_unfinished:
                expired.append(group)
        return expired
