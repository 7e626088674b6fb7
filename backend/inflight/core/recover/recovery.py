"""Recovery from a failed iteration: finds the faulty request, and computes the others again up to where they were.

Nobody knows what a device that raised has done with a batch, so every sequence that was in it gives up slots and
blocks, and is computed again from its known tokens. Halves of the requests are tried apart (`Isolation`) until the
faulty one is alone. A request that makes the scheduler's own `schedule` raise is found in the same way. The
scheduler calls this, on the loop thread.
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
    """Finds the request that makes iterations fail: halves of those that were in a failed batch are tried apart.

    It owns the sets of requests that are still to be retried; the first set has the device to itself. A set whose
    iteration fails is split, and a request that fails alone is faulty. A set is cleared once all its sequences
    got past the point where they failed. One faulty request among n takes about 2 log2(n) iterations more.

    It knows nothing of states, slots or blocks.
    """

    def __init__(self) -> None:
        self._sets: deque[tuple[int, ...]] = deque()

    @property
    def is_active(self) -> bool:
        """Whether any requests are still to be retried."""
        return bool(self._sets)

    @property
    def retrying(self) -> tuple[int, ...]:
        """The ids of the requests that have the device to themselves now; () if all may run."""
        return self._sets[0] if self._sets else ()

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ids of all requests that are still to be retried, in the order of their turns."""
        return tuple(request_id for each in self._sets for request_id in each)

    def failed(self, request_ids: Sequence[int], was_alone: bool) -> int | None:
        """Note that an iteration with these requests failed, and return the faulty one if that is certain.

        Args:
            request_ids: Requests that were in it; unless one is faulty, all of them are to be retried.
            was_alone: Whether no other requests were in it.
        """
        self._drop(request_ids)
        if len(request_ids) == 1 and was_alone:
            return request_ids[0]
        half = (len(request_ids) + 1) // 2
        for part in (request_ids[half:], request_ids[:half]):
            if part:
                self._sets.appendleft(tuple(part))
        return None

    def clear(self, but: Collection[int] = ()) -> None:
        """Clear the requests that are retried now, `but` for some, which are the next to be retried."""
        self._sets.popleft()
        if but:
            self._sets.appendleft(tuple(but))

    def _drop(self, request_ids: Collection[int]) -> None:
        rest = (tuple(i for i in each if i not in request_ids) for each in self._sets)
        self._sets = deque(each for each in rest if each)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The requests found faulty, and the sequences involved, after a failed iteration.

    Attributes:
        faulty: Ids of the requests to end with the error.
        rows: The sequences that were in the iteration's batch, oldest first.
    """

    faulty: tuple[int, ...]
    rows: tuple[LlmRequest, ...]


class Recovery:
    """Restarts the sequences of failed iterations.

    Attributes:
        isolation: The requests that are still to be retried.
    """

    def __init__(self, running: Running, waiting: WaitingQueue) -> None:
        self.isolation = Isolation()
        self._running = running
        self._waiting = waiting
        self._is_back: set[LlmRequest] = set()  # void sequences with nothing in flight any more

    @property
    def has_void(self) -> bool:
        """Whether any sequence is void: it must not run before its rows in flight are back."""
        return any(llm_request.is_void for llm_request in self._running.sequences)

    def retrying(self, running: list[LlmRequest]) -> list[LlmRequest]:
        """The sequences of `running` that may run now."""
        ids = self.isolation.retrying
        return [llm_request for llm_request in running if llm_request.request_id in ids] if ids else running

    def judge(self, batch: ScheduledBatch, error: InflightError) -> Verdict:
        """Count a failed batch's rows as back, and find the faulty requests as far as that is known.

        A request that was alone in the batch is faulty. `Unavailable` means that the device itself is gone: then
        all requests of the batch end.
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

    def find_suspects(
        self, touched: Sequence[LlmRequest], groups: Mapping[int, RequestGroup]
    ) -> tuple[LlmRequest, ...]:
        """The sequences that may have made `schedule` raise, in the order in which they are to be retried.

        These are the requests that were being retried, if there are any; else the sequences that `schedule` had
        looked at; else all there are. To be called before anything is changed after the exception.

        Args:
            touched: The sequences that `schedule` had looked at.
            groups: All requests without a final response.
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

    def find_faulty(self, suspects: Sequence[LlmRequest], touched: Sequence[LlmRequest]) -> int | None:
        """The request that made `schedule` raise, if it was on its own; else None, and halves are retried."""
        request_ids = tuple(dict.fromkeys(llm_request.request_id for llm_request in suspects))
        if not request_ids:
            return None
        was_alone = all(llm_request.request_id in request_ids for llm_request in touched)
        return self.isolation.failed(request_ids, was_alone)

    def _rows(self, batch: ScheduledBatch) -> dict[LlmRequest, int]:
        """The sequences of a batch, oldest first, and with how many tokens each is in it."""
        owners = self._running.slots.owners
        rows = {owners[chunk.slot]: len(chunk.token_ids) for chunk in batch.context}
        for slot in batch.generation_slots:
            rows[owners[slot]] = 1
        return {
            llm_request: rows[llm_request] for llm_request in self._running.sequences if llm_request in rows
        }

    def retry(self, batch: ScheduledBatch, rows: Sequence[LlmRequest]) -> None:
        """Void the sequences of a failed batch that go on, and restart those with nothing else in flight."""
        # The batch released slots, too: nobody knows whether the device did that.
        self._running.slots.tell_again(batch.released_slots)
        owners = self._running.slots.owners
        # A sequence that started in it and has ended since has no slots, or another sequence has them.
        started = [
            owner
            for start in batch.starts
            if (owner := owners.get(start.slot)) is not None
            and (owner.request, owner.sequence_index) == (start.request, start.sequence_index)
        ]
        for llm_request in (*rows, *started, *self._users_of(batch)):
            if llm_request.state is not RequestState.FINISHED:
                llm_request.is_void = True
                self.rows_came_back(llm_request, 0)
        self.restart()

    def _users_of(self, batch: ScheduledBatch) -> list[LlmRequest]:
        """The running sequences with adapters that a failed batch was to load, which have to be loaded again.

        Nobody knows whether these are in their pages. Sequences that use one without a row in this batch started
        behind it, so nothing that was computed with it has come back yet.
        """
        loaded = {load.adapter.handle for load in batch.adapter_loads}
        if not loaded:
            return []
        self._running.adapter_pages.forget(loaded)
        return [
            llm_request
            for llm_request in self._running.sequences
            if (adapter := llm_request.group.adapter) is not None and adapter.handle in loaded
        ]

    def rows_came_back(self, llm_request: LlmRequest, num_tokens: int) -> None:
        """Count rows of a void sequence as back; after the last of them it can `restart`."""
        llm_request.num_scheduled_tokens -= num_tokens
        if llm_request.num_scheduled_tokens == 0:
            self._is_back.add(llm_request)

    def restart(self) -> None:
        """Restart the void sequences that have nothing in flight any more; the oldest goes to the front."""
        if not self._is_back:
            return
        again = [r for r in self._running.sequences if r in self._is_back and r.is_void]
        self._is_back.clear()
        for llm_request in reversed(again):
            self._running.leave(llm_request)
            llm_request.restart()
            self._waiting.add_in_front(llm_request)

    def review(self, groups: Mapping[int, RequestGroup]) -> None:
        """Clear the requests that are retried once all of them got past the point where they failed.

        Those that had no room to run are the next to be retried.
        """
        no_room: list[int] = []
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
    """After `schedule` raised half-way, make slots, block tables and the queue anew from the requests themselves.

    Nobody knows which of the scheduler's books were changed before it raised, nor whether they agree. The
    requests' tokens, and what was sent of them, are not among these books, and all else follows from them: every
    sequence gives up slots and blocks, and waits to be computed again from its known tokens. Afterwards no prefix
    is in the cache.

    Args:
        groups: All requests without a final response.
        running, waiting: The books.
        in_front: The sequences that wait before all others.

    Returns:
        Sequences that had ended and were waiting for their batches in flight, which count for nothing now.
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
