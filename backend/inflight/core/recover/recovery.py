"""What becomes of the sequences of a failed iteration: who is faulty, and how the others get where they were.

Nobody knows what a device that raised has done with a batch, so every sequence that was in it gives up slots and
blocks, and is computed again from its known tokens. Halves of the requests are tried apart (`isolation.py`) until
the faulty one is alone. A request that makes the scheduler's own `schedule` raise is found in the same way. Called
by the scheduler, on the loop thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.schedule.running import Running
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.errors import InflightError, Unavailable


class Isolation:
    """Suspects, by request id, in the order in which they will be tried."""

    def __init__(self) -> None:
        self._sets: deque[tuple[int, ...]] = deque()

    @property
    def is_active(self) -> bool:
        """Whether anybody is under suspicion."""
        return bool(self._sets)

    @property
    def retrying(self) -> tuple[int, ...]:
        """The requests that have the device to themselves now; () for everybody."""
        return self._sets[0] if self._sets else ()

    @property
    def suspects(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(request_id for each in self._sets for request_id in each)

    def failed(self, request_ids: Sequence[int], was_alone: bool) -> int | None:
        """An iteration with these requests failed; the one that is faulty, if that is certain.

        Args:
            request_ids: Who was in it; every one is to be tried again.
            was_alone: Whether nobody else was.
        """
        self._clear(request_ids)
        if len(request_ids) == 1 and was_alone:
            return request_ids[0]
        half = (len(request_ids) + 1) // 2
        for part in (request_ids[half:], request_ids[:half]):
            if part:
                self._sets.appendleft(tuple(part))
        return None

    def clear(self, but: Collection[int] = ()) -> None:
        """Nothing more is held against those being retried, `but` for some, who are to be tried again."""
        self._sets.popleft()
        if but:
            self._sets.appendleft(tuple(but))

    def _clear(self, request_ids: Collection[int]) -> None:
        rest = (tuple(i for i in each if i not in request_ids) for each in self._sets)
        self._sets = deque(each for each in rest if each)


@dataclass(frozen=True, slots=True)
class Verdict:
    """After a failed iteration.

    Attributes:
        faulty: Requests to end with the error.
        rows: Sequences that were in it, oldest first.
    """

    faulty: tuple[int, ...]
    rows: tuple[LlmRequest, ...]


class Recovery:
    """Retries.

    Attributes:
        isolation: Who is under suspicion.
    """

    def __init__(self, running: Running, waiting: WaitingQueue) -> None:
        self.isolation = Isolation()
        self._running = running
        self._waiting = waiting
        self._is_back: set[LlmRequest] = set()  # void sequences with nothing in flight any more

    @property
    def has_void(self) -> bool:
        """Whether something in flight counts for nothing: its sequences are not to run before it is back."""
        return any(llm_request.is_void for llm_request in self._running.sequences)

    def retrying(self, running: list[LlmRequest]) -> list[LlmRequest]:
        """Of `running`, those that may run now."""
        ids = self.isolation.retrying
        return [llm_request for llm_request in running if llm_request.request_id in ids] if ids else running

    def judge(self, batch: ScheduledBatch, error: InflightError) -> Verdict:
        """Take a failed batch's rows back, and find who is faulty as far as that is known.

        A request that was alone is. With `Unavailable` the device itself says that it is no use: then all are.
        """
        rows = self._rows(batch)
        blamed = [r for r in rows if not r.is_void and r.state is not RequestState.FINISHED]
        for llm_request in blamed:
            llm_request.retry_until = llm_request.next_position
        for llm_request, num_tokens in rows.items():
            llm_request.num_scheduled_tokens -= num_tokens
        request_ids = tuple(dict.fromkeys(r.request_id for r in blamed))
        faulty: tuple[int, ...] = ()
        if isinstance(error, Unavailable):
            faulty = request_ids
        elif request_ids:
            certain = self.isolation.failed(request_ids, was_alone=len(blamed) == len(rows))
            faulty = () if certain is None else (certain,)
        return Verdict(faulty, tuple(rows))

    def blame(
        self, touched: Sequence[LlmRequest], groups: Mapping[int, RequestGroup]
    ) -> tuple[LlmRequest, ...]:
        """`schedule` raised when it had looked at these sequences: who is to be tried apart, in this order.

        To be called while they are as it left them. Of those being retried, if anybody is, and of everybody there
        is where it had not got as far as looking at anyone.
        """
        retrying = self.isolation.retrying
        if retrying:
            suspects = [s for i in retrying if i in groups for s in groups[i].sequences]
        else:
            suspects = list(touched) or [s for group in groups.values() for s in group.sequences]
        for llm_request in dict.fromkeys((*touched, *suspects)):
            # Known tokens come back as one context. Whether the next one can be scheduled shows only after that.
            llm_request.retry_until = llm_request.next_position + 2
        self._is_back.clear()
        return tuple(dict.fromkeys(s for s in suspects if s.state is not RequestState.FINISHED))

    def sentence(self, suspects: Sequence[LlmRequest], touched: Sequence[LlmRequest]) -> int | None:
        """Which request made `schedule` raise, if that is certain: it was on its own. Else halves are tried."""
        request_ids = tuple(dict.fromkeys(llm_request.request_id for llm_request in suspects))
        if not request_ids:
            return None
        was_alone = all(llm_request.request_id in request_ids for llm_request in touched)
        return self.isolation.failed(request_ids, was_alone)

    def _rows(self, batch: ScheduledBatch) -> dict[LlmRequest, int]:
        """Who is in a batch and with how many tokens."""
        owners = self._running.slots.owners
        rows = {owners[chunk.slot]: len(chunk.token_ids) for chunk in batch.context}
        for slot in batch.generation_slots:
            rows[owners[slot]] = 1
        return {
            llm_request: rows[llm_request] for llm_request in self._running.sequences if llm_request in rows
        }

    def retry(self, batch: ScheduledBatch, rows: Sequence[LlmRequest]) -> None:
        """Let the sequences of a failed batch that go on begin again, the oldest first of all."""
        # Beside its rows the batch told of slots: nobody knows whether the device knows.
        self._running.slots.tell_again(batch.released_slots)
        owners = self._running.slots.owners
        # Who started in it and has ended since has no slots, or another has them.
        started = [
            owner
            for start in batch.starts
            if (owner := owners.get(start.slot)) is not None
            and (owner.request, owner.sequence_index) == (start.request, start.sequence_index)
        ]
        for llm_request in (*rows, *started):
            if llm_request.state is not RequestState.FINISHED:
                llm_request.is_void = True
                self.take_back(llm_request, 0)
        self.restart()

    def take_back(self, llm_request: LlmRequest, num_tokens: int) -> None:
        """Rows of a void sequence came back; with the last of them it may `restart`."""
        llm_request.num_scheduled_tokens -= num_tokens
        if llm_request.num_scheduled_tokens == 0:
            self._is_back.add(llm_request)

    def restart(self) -> None:
        """Let those that are free to begin again do so, the oldest first."""
        if not self._is_back:
            return
        again = [r for r in self._running.sequences if r in self._is_back and r.is_void]
        self._is_back.clear()
        for llm_request in reversed(again):
            self._running.leave(llm_request)
            llm_request.restart()
            self._waiting.add_in_front(llm_request)

    def review(self, groups: Mapping[int, RequestGroup]) -> None:
        """Clear those being retried who are past the point where they failed; who had no room is tried next."""
        no_room = []
        for request_id in self.isolation.retrying:
            group = groups.get(request_id)
            for llm_request in group.sequences if group else ():
                ended = llm_request.state is RequestState.FINISHED
                if ended or llm_request.num_computed_tokens >= llm_request.retry_until:
                    continue
                if llm_request.state is RequestState.RUNNING:
                    return
                no_room.append(request_id)
        self.isolation.clear(but=tuple(dict.fromkeys(no_room)))


def rebuild(
    groups: Iterable[RequestGroup],
    running: Running,
    waiting: WaitingQueue,
    in_front: Collection[LlmRequest],
) -> list[LlmRequest]:
    """Let nothing run and every sequence that has not ended wait, those of `in_front` before all others.

    Returns:
        Sequences that had ended and were waiting for their batches in flight: nothing keeps them any more.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    ended = [s for s in sequences if s.state is RequestState.FINISHED and s.slots]
    running.clear()
    for sequence in sequences:
        sequence.num_scheduled_tokens = 0
        sequence.slots = ()
        if sequence.state is RequestState.RUNNING:
            sequence.restart()
    unfinished = [sequence for sequence in sequences if sequence.state is not RequestState.FINISHED]
    waiting.rebuild(unfinished + ended, in_front)
    return ended
