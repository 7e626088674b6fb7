"""Queues of responses from the engine to a consumer that may be slower.

A Delivery holds the responses that wait for one consumer: a sender thread, a connection's writer, a
coroutine, or a program that fetches them. A consumer that falls behind gets one merged response per
sequence, so that its work is bounded by the number of sequences, not of tokens. The sequences of a request
are merged separately and end in any order, but the request's final response is always taken last.

Any thread may call any method. An idle consumer waits on a condition variable.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from inflight.access_log import AccessEntry
from inflight.core.ports import SendResponseCallback
from inflight.core.request.response import Response, merge_responses

MAX_MERGED_LOGITS_BYTES = 8 << 20
"""Largest size in bytes of the generation_logits and additional outputs of merged responses.

Without this limit, a stream that falls behind could need as much memory as its whole answer.
"""

_log = logging.getLogger(__name__)

_Key = tuple[int, int]  # request id, sequence index
_R = TypeVar("_R", bound=Response)


def pass_on(response: Response, on_response: SendResponseCallback, log_extra: dict[str, str] | None) -> None:
    """Call a front end's function with a response. Log its errors, which must not end other requests.

    Args:
        response: The response.
        on_response: The front end's function.
        log_extra: The argument `extra` of log lines about the request.
    """
    try:
        on_response(response)
    except Exception:  # the caller's thread serves all requests
        _log.exception(
            "a front end failed to take a response of request %d", response.request_id, extra=log_extra
        )


class ResponseTarget(NamedTuple):
    """A front end's function for a request's responses, and the request's entry in the access log."""

    on_response: SendResponseCallback
    entry: AccessEntry | None

    def take(self, response: Response) -> None:
        """Pass a response on to the front end."""
        pass_on(response, self.on_response, self.entry.log_extra if self.entry else None)


class Delivery(Generic[_R]):
    """A queue of responses, served in the order in which sequences started to wait.

    A request id must not be reused while its final response is still waiting here.

    Args:
        limit: Largest number of responses to take at a time; 0: no limit. Responses that are left waiting
            are merged with later ones.
        interval: A sequence's responses are held back until they have this many tokens together, at least 1.
            The first and the last response of a sequence are never held back.
        merges: Whether the waiting responses of a sequence are merged. If not, responses are taken
            unchanged, and all responses of one request are taken together.
        on_news: Function for a consumer that does not wait in `take`: called on the thread of `put`, without
            a lock, when the queue becomes non-empty. The consumer must then take until the queue is empty.
    """

    def __init__(
        self,
        limit: int = 0,
        interval: int = 1,
        merges: bool = True,
        on_news: Callable[[], object] | None = None,
    ) -> None:
        self._limit = limit
        self._interval = interval
        self._merges = merges
        self._on_news = on_news
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._asleep = threading.Condition(lock)
        self._waiting: dict[_Key, list[_R]] = {}  # in order of first insertion, hence fair
        # Indices of the waiting sequences other than 0, by request. Requests with one sequence have no
        # entry.
        self._further: dict[int, set[int]] = {}
        # Responses held back because of `interval`, by request and sequence. A sequence has no entry before
        # its first response.
        self._held: dict[int, dict[int, list[_R]]] = {}
        self._num_consumers_asleep = 0
        self._closed = False

    def put(self, response: _R) -> None:
        """Add one response without waiting for the consumer, in O(1); in O(sequences) if it is an error.

        A sequence that is already waiting keeps its place in the queue. After `close` responses are dropped.
        """
        with self._changed:
            if self._closed:
                return
            was_empty = not self._waiting
            if self._interval == 1:
                self._add(response)
            else:
                for each in self._due(response):
                    self._add(each)
            has_news = was_empty and bool(self._waiting)
        if has_news and self._on_news is not None:
            self._on_news()

    def take(self, timeout_s: float | None = None, request_id: int | None = None) -> list[_R]:
        """Wait for responses and take them, longest waiting first.

        Args:
            timeout_s: Seconds to wait for the first response; None waits until there is one.
            request_id: Request whose responses to take; None: take those of all requests, at most `limit`.

        Returns:
            The responses; empty if the delivery is closed and has no more, or after the timeout.
        """
        with self._changed:
            if not self._waits(request_id) and not self._closed and timeout_s != 0:
                self._sleep(timeout_s, request_id)
            backlogs = self._take(request_id)
        if self._merges:
            return [merge_responses(backlog) for backlog in backlogs]
        return [response for backlog in backlogs for response in backlog]

    def run(self, sink: Callable[[list[_R]], object]) -> None:
        """Pass responses to `sink`, on this thread, until the delivery is closed and has no more."""
        while responses := self.take():
            sink(responses)

    def count(self, request_id: int | None = None) -> int:
        """Return how many responses wait to be taken, of one request or of all."""
        with self._changed:
            keys = self._waiting if request_id is None else self._keys_of(request_id)
            return sum(len(self._waiting[key]) for key in keys)

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait, at most `timeout_s` seconds, until all responses are sent; return whether they are.

        They are sent when the queue is empty and the consumer waits in `take` again. Responses that are held
        back because of `interval` do not count.
        """
        with self._changed:
            return self._asleep.wait_for(
                lambda: self._closed or (not self._waiting and self._num_consumers_asleep > 0), timeout_s
            )

    def close(self) -> None:
        """Accept no more responses. Waiting responses can still be taken; then `take` returns an empty list."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._asleep.notify_all()

    # ---------------------------------------------------------------- under the lock

    def _due(self, response: _R) -> list[_R]:
        """Return the responses to queue now: none if `response` is held back, else all held-back ones and it."""
        sequences = self._held.setdefault(response.request_id, {})
        is_first = response.sequence_index not in sequences
        held = sequences.setdefault(response.sequence_index, [])
        held.append(response)
        if response.is_final:
            del self._held[response.request_id]
            others = (each for index, each in sequences.items() if index != response.sequence_index)
            return [*chain.from_iterable(others), *held]
        ends = response.result is not None and response.result.is_sequence_final
        if is_first or ends or _num_tokens(held) >= self._interval:
            sequences[response.sequence_index] = []
            return held
        return []

    def _add(self, response: _R) -> None:
        key = (response.request_id, response.sequence_index if self._merges else 0)
        if response.result is None and self._merges:
            self._drop_all(response.request_id)
        backlog = self._waiting.get(key)
        if backlog is not None:
            backlog.append(response)  # merged on the consumer's thread, to save time of the loop thread
            return
        self._append(key, [response])
        if self._num_consumers_asleep:
            self._changed.notify_all()

    def _append(self, key: _Key, backlog: list[_R]) -> None:
        self._waiting[key] = backlog
        if key[1]:
            self._further.setdefault(key[0], set()).add(key[1])

    def _remove(self, key: _Key) -> list[_R]:
        further = self._further.get(key[0])
        if further is not None:
            further.discard(key[1])
            if not further:
                del self._further[key[0]]
        return self._waiting.pop(key, [])

    def _drop_all(self, request_id: int) -> None:
        """Drop a request's waiting responses, because an error follows, which is queued as sequence 0."""
        for index in tuple(self._further.get(request_id, ())):
            self._remove((request_id, index))
        if (request_id, 0) in self._waiting:
            self._waiting[request_id, 0].clear()

    def _sleep(self, timeout_s: float | None, request_id: int | None) -> None:
        self._num_consumers_asleep += 1
        self._asleep.notify_all()
        try:
            self._changed.wait_for(lambda: self._waits(request_id) or self._closed, timeout_s)
        finally:
            self._num_consumers_asleep -= 1

    def _take(self, request_id: int | None) -> list[list[_R]]:
        taken: list[list[_R]] = []
        while self._waits(request_id) and not taken:
            for key in self._next_keys(request_id):
                backlog = self._remove(key)
                if backlog[-1].is_final and self._waits(key[0]):
                    self._append(key, backlog)  # after its request's other sequences
                    continue
                count = _num_to_merge(backlog) if self._merges else len(backlog)
                taken.append(backlog[:count])
                if count < len(backlog):
                    self._append(key, backlog[count:])
        return taken

    def _next_keys(self, request_id: int | None) -> list[_Key]:
        if request_id is None:
            return list(islice(self._waiting, self._limit or None))
        return self._keys_of(request_id)

    def _keys_of(self, request_id: int) -> list[_Key]:
        keys = [(request_id, index) for index in (0, *self._further.get(request_id, ()))]
        return [key for key in keys if key in self._waiting]

    def _waits(self, request_id: int | None) -> bool:
        if request_id is None:
            return bool(self._waiting)
        return request_id in self._further or (request_id, 0) in self._waiting


def _num_tokens(held: list[_R]) -> int:
    """Count the tokens of these responses.

    A cumulative response repeats earlier tokens and counts as one token.
    """
    return sum(
        1 if each.result.is_cumulative else len(each.result.output_token_ids[0])
        for each in held
        if each.result is not None
    )


def _num_to_merge(backlog: list[_R]) -> int:
    """Return how many of the first responses to merge: all, unless their tensors are larger than the limit."""
    last = backlog[-1].result
    if last is None or last.is_cumulative or (last.generation_logits is None and not last.additional_outputs):
        return len(backlog)
    num_bytes = 0
    for count, response in enumerate(backlog):
        num_bytes += 0 if response.result is None else response.result.num_tensor_bytes
        if num_bytes > MAX_MERGED_LOGITS_BYTES:
            return max(count, 1)
    return len(backlog)
