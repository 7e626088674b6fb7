"""Recovery from a failed iteration: finds the faulty request and recomputes the others.

After a failure the state of the batch on the device is unknown, so every sequence in the batch gives up slots and
blocks and is recomputed from its known tokens. The requests are retried in halves (`Isolation`) until the faulty
request is alone. A request that makes `schedule` itself raise is found by the same method. Used by the
scheduler, on the loop thread.
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
    """Finds the request that makes iterations fail by bisecting the requests of a failed batch.

    Owns the sets of requests that are still to be retried; only the first set may run. A set whose iteration fails
    is split in two, and a request that fails alone is faulty. A set is cleared once all its sequences have passed
    the point of failure. Finding one faulty request among n takes about 2 log2(n) extra iterations.

    Independent of request states, slots and blocks.
    """

    def __init__(self) -> None:
        self._sets: deque[tuple[int, ...]] = deque()

    @property
    def is_active(self) -> bool:
        """Whether any request is still to be retried."""
        return bool(self._sets)

    @property
    def retrying(self) -> tuple[int, ...]:
        """The ids of the requests that may run now; () if all requests may run."""
        return self._sets[0] if self._sets else ()

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ids of all requests still to be retried, in order."""
        return tuple(request_id for each in self._sets for request_id in each)

    def failed(self, request_ids: Sequence[int], was_alone: bool) -> int | None:
        """Record that an iteration with these requests failed; return the faulty request if it is certain.

        Args:
            request_ids: The requests in the iteration. Unless a faulty one is returned, all are retried.
            was_alone: Whether the iteration had no other requests.
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
        """Clear the first set of requests, except the requests in `but`, which are retried next."""
        self._sets.popleft()
        if but:
            self._sets.appendleft(tuple(but))

    def _drop(self, request_ids: Collection[int]) -> None:
        rest = (tuple(i for i in each if i not in request_ids) for each in self._sets)
        self._sets = deque(each for each in rest if each)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a failed iteration.

    Attributes:
        faulty: Ids of the requests to end with the error.
        rows: The sequences that were in the iteration's batch, oldest first.
    """

    faulty: tuple[int, ...]
    rows: tuple[LlmRequest, ...]


class Recovery:
    """Restarts the sequences of failed iterations.

    Attributes:
        isolation: The requests still to be retried.
    """

    def __init__(self, running: Running, waiting: WaitingQueue) -> None:
        self.isolation = Isolation()
        self._running = running
        self._waiting = waiting
        self._is_back: set[LlmRequest] = set()  # void sequences without rows in flight

    @property
    def has_void(self) -> bool:
        """Whether any sequence is void, and must not run before its rows in flight are back."""
        return any(llm_request.is_void for llm_request in self._running.sequences)

    def retrying(self, running: list[LlmRequest]) -> list[LlmRequest]:
        """Return the sequences in `running` that may run now."""
        ids = self.isolation.retrying
        return [llm_request for llm_request in running if llm_request.request_id in ids] if ids else running

    def judge(self, batch: ScheduledBatch, error: InflightError) -> Verdict:
        """Mark a failed batch's rows as no longer in flight, and find its faulty requests if they are certain.

        A request that was alone in the batch is faulty. `Unavailable` means that the device is gone: then all
        requests of the batch end.
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
        """Return the sequences that may have made `schedule` raise, in the order to retry them.

        If requests are being retried, their sequences; otherwise the sequences that `schedule` had examined; if
        there are none, all sequences. Must be called before any state is changed after the exception.

        Args:
            touched: The sequences that `schedule` had examined.
            groups: All requests without a final response.
        """
        retrying = self.isolation.retrying
        if retrying:
            suspects = [s for i in retrying if i in groups for s in groups[i].sequences]
        else:
            suspects = list(touched) or [s for group in groups.values() for s in group.sequences]
        for llm_request in dict.fromkeys((*touched, *suspects)):
            # The known tokens are recomputed as one context; only after this context and one more token has the
            # sequence passed the point of failure.
            llm_request.retry_until = llm_request.next_position + 2
        self._is_back.clear()
        return tuple(dict.fromkeys(s for s in suspects if s.state is not RequestState.FINISHED))

    def find_faulty(self, suspects: Sequence[LlmRequest], touched: Sequence[LlmRequest]) -> int | None:
        """Return the request that made `schedule` raise if it is the only suspect; otherwise record the
        suspects, to be retried in halves, and return None."""
        request_ids = tuple(dict.fromkeys(llm_request.request_id for llm_request in suspects))
        if not request_ids:
            return None
        was_alone = all(llm_request.request_id in request_ids for llm_request in touched)
        return self.isolation.failed(request_ids, was_alone)

    def _rows(self, batch: ScheduledBatch) -> dict[LlmRequest, int]:
        """Return the sequences of a batch, oldest first, and how many tokens of each are in it."""
        owners = self._running.slots.owners
        rows = {owners[chunk.slot]: len(chunk.token_ids) for chunk in batch.context}
        for slot in batch.generation_slots:
            rows[owners[slot]] = 1
        return {
            llm_request: rows[llm_request] for llm_request in self._running.sequences if llm_request in rows
        }

    def retry(self, batch: ScheduledBatch, rows: Sequence[LlmRequest]) -> None:
        """Mark the remaining sequences of a failed batch as void, and restart those without rows in flight."""
        # It is unknown whether the device has released the batch's released slots, so the next batch releases
        # them again.
        self._running.slots.release_again(batch.released_slots)
        owners = self._running.slots.owners
        # A sequence that started in the batch and has ended since has no slots, or other sequences have them now.
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
        """Return the running sequences whose adapters were to be loaded by a failed batch.

        It is unknown whether these adapters are in their pages, so they are loaded again. A sequence that uses
        such an adapter but had no row in this batch started later, so none of its results are back yet.
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
        """Count `num_tokens` finished rows of a void sequence.

        Once none of its rows is in flight, the sequence can `restart`.
        """
        llm_request.num_scheduled_tokens -= num_tokens
        if llm_request.num_scheduled_tokens == 0:
            self._is_back.add(llm_request)

    def restart(self) -> None:
        """Restart the void sequences without rows in flight; the oldest goes to the front of the queue."""
        if not self._is_back:
            return
        again = [r for r in self._running.sequences if r in self._is_back and r.is_void]
        self._is_back.clear()
        for llm_request in reversed(again):
            self._running.leave(llm_request)
            llm_request.restart()
            self._waiting.add_in_front(llm_request)

    def review(self, groups: Mapping[int, RequestGroup]) -> None:
        """Clear the requests being retried, once all that could run have passed the token at which they
        failed.

        Requests for which there were no slots or blocks are retried next.
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
    """After `schedule` raised half-way, rebuild slots, block tables and the queue from the requests.

    It is unknown which of the scheduler's records were changed before the exception, and whether they are
    consistent. The requests' tokens, and the counts of sent tokens, are not affected, and everything else is
    derived from them: every sequence gives up slots and blocks, and waits to be recomputed from its known
    tokens. The prefix cache is empty afterwards.

    Args:
        groups: All requests without a final response.
        running, waiting: The records to rebuild.
        in_front: The sequences to put at the front of the queue.

    Returns:
        The ended sequences that were waiting for their batches in flight, which are now ignored.
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
