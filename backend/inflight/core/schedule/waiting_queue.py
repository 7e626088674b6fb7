"""The waiting requests, by priority, and within a priority with equal shares for all clients.

    priority   sequences of higher priority always come first
    in front   of their priority: paused sequences, and sequences whose prompt a sibling has computed
    clients    of one priority take turns by start-time fair queueing: the client that was served least, in tokens,
               goes next; each client's own requests go in order of arrival
    prefixes   with the policy LPM, a client's sequence with a longer cached prefix may overtake earlier ones, each
               of which is overtaken a bounded number of times

When a sequence starts, its client's account is charged for the prompt and all tokens that it may generate; the
tokens that were not generated are refunded when the sequence ends. A client that had no waiting requests starts
with the account of the client served last, or with its own account if that is higher; charges for sequences
that still run are left out of both. So no client can save up shares, none can lose its charges by sending one
request at a time, and none has to wait for tokens that others may generate but will not. When no client is
left, all accounts start anew. Requests without a client id belong to one common client.

Deterministic. Used on the loop thread. Reference: Goyal, Vin, Cheng, "Start-time Fair Queueing" (1996).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from inflight.core.request.llm_request import LlmRequest, RequestState

_MAX_ABSENT = 1024
"""Maximum number of clients without requests whose accounts are kept because they had more than their share."""
_MAX_COMPARED = 32
"""Maximum number of a client's sequences among which the next one is chosen by its cached prefix."""
_MAX_FOLLOWED = 8
"""Maximum number of priorities whose turns are updated at every charge, as there may be as many as requests."""


class _PriorityQueue:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.front: OrderedDict[int, LlmRequest] = OrderedDict()
        self.clients: dict[int, OrderedDict[int, LlmRequest]] = {}
        # A heap of (served, key of the client's first sequence, client); some entries are outdated.
        self.turns: list[tuple[int, int, int]] = []  # up to date while the level is in `_followed`
        self.num_new = 0  # sequences that never ran, including siblings not queued yet

    def __bool__(self) -> bool:
        return bool(self.front) or bool(self.clients)


@dataclass(slots=True)
class _Client:
    """The account of a client with waiting or running sequences.

    Attributes:
        served: Tokens charged, including all that running sequences may still generate.
        promised: The part of `served` that is charged for sequences that still run.
        num_present: Number of the client's waiting (including held) and running sequences.
        num_queued: Number of the client's waiting requests that never ran.
    """

    served: int
    promised: int = 0
    num_present: int = 0
    num_queued: int = 0

    @property
    def settled(self) -> int:
        return self.served - self.promised


class WaitingQueue:
    """The waiting queue. A sequence is in it at most once."""

    def __init__(self) -> None:
        self._levels: dict[float, _PriorityQueue] = {}
        self._priorities: list[float] = []  # negated, so that the first is the highest
        # Levels that recently were the highest, in the order in which they were.
        self._followed: dict[float, _PriorityQueue] = {}
        self._size = 0
        self._num_new = 0
        self._clients: dict[int, _Client] = {}
        # Tokens charged to clients that have no requests now but had more than their share.
        self._absent: dict[int, int] = {}
        self._virtual_time = 0  # maximum of settled tokens over the clients that started a sequence

    def __len__(self) -> int:
        return self._size

    def num_new(self, priority: float) -> int:
        """Return the number of sequences that never ran and have at least this priority; O(levels)."""
        return sum(level.num_new for at, level in self._levels.items() if at >= priority)

    @property
    def num_new_at_all(self) -> int:
        """Number of sequences that never ran, of any priority."""
        return self._num_new

    # ---------------------------------------------------------------- entering and leaving

    def hold(self, llm_request: LlmRequest) -> None:
        """Count a held request's first sequence for its client, without queueing it."""
        self._enter(llm_request.request.client_id)

    def add(self, llm_request: LlmRequest, was_held: bool = False) -> None:
        """Queue a new request's first sequence after its client's others; `was_held`: whether `hold` has
        counted it."""
        client = llm_request.request.client_id
        account = self._clients[client] if was_held else self._enter(client)
        if not account.num_queued:
            account.served += max(0, self._virtual_time - account.settled)
        self._add_new(llm_request, account)

    def _add_new(self, llm_request: LlmRequest, account: _Client, is_first: bool = False) -> None:
        """Queue a sequence that never ran after its client's others, or before them if `is_first`."""
        request = llm_request.request
        client, level = request.client_id, self._level(request.priority)
        account.num_queued += 1
        queue = level.clients.setdefault(client, OrderedDict())
        queue[llm_request.key] = llm_request
        if is_first:
            queue.move_to_end(llm_request.key, last=False)
        self._count_new(level, request.sampling.num_sequences)
        self._size += 1
        if (is_first or len(queue) == 1) and request.priority in self._followed:
            self._push_turn(level, client)

    def add_in_front(self, llm_request: LlmRequest) -> None:
        """Queue a sequence that ran before, or whose prompt is computed, in front of all others of its
        priority."""
        front = self._level(llm_request.request.priority).front
        front[llm_request.key] = llm_request
        front.move_to_end(llm_request.key, last=False)
        self._size += 1

    def put_back(self, llm_request: LlmRequest, was_in_front: bool) -> None:
        """Undo the `remove` of the sequence that was first in the queue."""
        if was_in_front:
            self.add_in_front(llm_request)
        else:
            self._add_new(llm_request, self._clients[llm_request.request.client_id], is_first=True)

    def remove(self, llm_request: LlmRequest) -> bool | None:
        """Remove a sequence; return whether it was in front, or None if it was not in the queue."""
        request = llm_request.request
        level = self._levels.get(request.priority)
        if level is None:
            return None
        was_in_front = level.front.pop(llm_request.key, None) is not None
        if not was_in_front:
            queue = level.clients.get(request.client_id)
            if queue is None or queue.pop(llm_request.key, None) is None:
                return None
            self._clients[request.client_id].num_queued -= 1
            self._count_new(level, -request.sampling.num_sequences)
            if not queue:
                del level.clients[request.client_id]
            elif request.priority in self._followed:
                self._push_turn(level, request.client_id)
        self._size -= 1
        if not level:
            del self._levels[request.priority]
            self._followed.pop(request.priority, None)
            self._priorities.remove(-request.priority)
        return was_in_front

    def first(self) -> LlmRequest | None:
        """Return the sequence whose turn it is; None if the queue is empty."""
        if not self._priorities:
            return None
        priority = -self._priorities[0]
        level = self._levels[priority]
        if level.front:
            return next(iter(level.front.values()))
        if priority not in self._followed:
            self._follow(priority, level)
        while True:
            served, key, client = level.turns[0]
            queue = level.clients.get(client)
            if queue and served == self._clients[client].served and key == next(iter(queue)):
                return queue[key]
            heappop(level.turns)

    def may_overtake(self, first: LlmRequest, max_overtaken: int) -> list[LlmRequest]:
        """Return the sequence whose turn it is, and those that may start in its place, in order.

        They are of the same client and priority, and all sequences before them have been overtaken less than
        `max_overtaken` times.
        """
        level = self._levels[first.request.priority]
        if level.front:
            return [first]
        found: list[LlmRequest] = []
        for llm_request in islice(level.clients[first.request.client_id].values(), _MAX_COMPARED):
            found.append(llm_request)
            if llm_request.num_overtaken >= max_overtaken:
                break
        return found

    def overtake(self, llm_request: LlmRequest) -> None:
        """Move a sequence that never ran before the others of its client and priority."""
        request = llm_request.request
        level = self._levels[request.priority]
        queue = level.clients[request.client_id]
        for other in queue.values():
            if other is llm_request:
                break
            other.num_overtaken += 1
        queue.move_to_end(llm_request.key, last=False)
        if request.priority in self._followed:
            self._push_turn(level, request.client_id)

    def in_front(self) -> Iterator[LlmRequest]:
        """Yield the sequences in front of their priorities, in order; the queue must not change meanwhile."""
        for negated in self._priorities:
            yield from self._levels[-negated].front.values()

    def in_order(self) -> Iterator[LlmRequest]:
        """Yield the sequences in order, clients by their next turns, for people to read."""
        for negated in self._priorities:
            level = self._levels[-negated]
            yield from level.front.values()
            for client in sorted(
                level.clients, key=lambda c: (self._clients[c].served, next(iter(level.clients[c])))
            ):
                yield from level.clients[client].values()

    # ---------------------------------------------------------------- shares

    def charge(self, llm_request: LlmRequest) -> None:
        """Charge a client for a sequence that starts for the first time."""
        client = llm_request.request.client_id
        account = self._enter(client) if llm_request.sequence_index > 0 else self._clients[client]
        self._virtual_time = max(self._virtual_time, account.settled)
        account.promised += _cost(llm_request)
        self._serve(client, _cost(llm_request))

    def leave(self, llm_request: LlmRequest) -> None:
        """Record that a sequence has ended, and refund its client the tokens that were charged but not
        generated."""
        if not llm_request.has_started and llm_request.sequence_index > 0:
            return  # the sequence was not counted
        client = llm_request.request.client_id
        account = self._clients[client]
        if llm_request.has_started:
            account.promised -= _cost(llm_request)
            unused = llm_request.max_length - len(llm_request.tokens)
            self._serve(client, -unused * llm_request.num_slots)
        account.num_present -= 1
        if account.num_present == 0:
            self._drop_account(client)

    def rebuild(self, sequences: Iterable[LlmRequest], in_front: Collection[LlmRequest]) -> None:
        """Rebuild the queue, even if its records are inconsistent; the clients' accounts are kept.

        Args:
            sequences: All unfinished sequences; none of them runs. Ended sequences, and sequences that wait for a
                sibling to compute the prompt, are not queued but count for their clients.
            in_front: The sequences to put in front of all others of their priority, in this order. Other sequences
                that ran before follow, oldest first.
        """
        present = sorted(sequences, key=lambda sequence: sequence.key)
        self._levels, self._priorities, self._followed = {}, [], {}
        self._size = self._num_new = 0
        self._recount(present)
        queued = dict.fromkeys(sequence for sequence in present if _is_queued(sequence))
        first = [sequence for sequence in in_front if sequence in queued]
        for sequence in first:
            del queued[sequence]
        ran = [s for s in queued if s.state is RequestState.PAUSED or s.sequence_index > 0]
        for sequence in ran:
            del queued[sequence]
        for sequence in queued:
            self._add_new(sequence, self._clients[sequence.request.client_id])
        for sequence in reversed([*first, *ran]):
            self.add_in_front(sequence)

    def _recount(self, present: list[LlmRequest]) -> None:
        """Recount the clients' sequences, and charge clients only for sequences that have started."""
        known, self._clients = self._clients, {}
        for sequence in present:
            if sequence.sequence_index and not sequence.has_started:
                continue
            client = sequence.request.client_id
            if client not in self._clients and (account := known.get(client)) is not None:
                self._clients[client] = _Client(account.settled)
            account = self._enter(client)
            if sequence.has_started:
                account.served += _cost(sequence)
                account.promised += _cost(sequence)

    def _drop_account(self, client: int) -> None:
        """Drop the account of a client without sequences; if the client had more than its share, keep its
        tokens."""
        settled = self._clients.pop(client).settled
        if not self._clients:
            self._absent.clear()
        elif settled > self._virtual_time:
            self._absent[client] = settled
            if len(self._absent) > _MAX_ABSENT:
                del self._absent[next(iter(self._absent))]

    def _enter(self, client: int) -> _Client:
        account = self._clients.get(client)
        if account is None:
            account = self._clients[client] = _Client(max(self._virtual_time, self._absent.pop(client, 0)))
        account.num_present += 1
        return account

    def _serve(self, client: int, tokens: int) -> None:
        self._clients[client].served += tokens
        for level in self._followed.values():
            if client in level.clients:
                self._push_turn(level, client)

    def _follow(self, priority: float, level: _PriorityQueue) -> None:
        if len(self._followed) == _MAX_FOLLOWED:
            del self._followed[next(iter(self._followed))]
        self._followed[priority] = level
        self._order_turns(level)

    def _push_turn(self, level: _PriorityQueue, client: int) -> None:
        heappush(level.turns, (self._clients[client].served, next(iter(level.clients[client])), client))
        if len(level.turns) > 4 * len(level.clients) + 64:
            self._order_turns(level)

    def _order_turns(self, level: _PriorityQueue) -> None:
        level.turns = [(self._clients[c].served, next(iter(q)), c) for c, q in level.clients.items()]
        heapify(level.turns)

    def _count_new(self, level: _PriorityQueue, count: int) -> None:
        level.num_new += count
        self._num_new += count

    def _level(self, priority: float) -> _PriorityQueue:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _PriorityQueue()
            self._priorities.insert(bisect_left(self._priorities, -priority), -priority)
        return level


def _is_queued(llm_request: LlmRequest) -> bool:
    """Whether a sequence that does not run belongs in the queue.

    It does not if it is held, or if another sequence of its request computes the prompt.
    """
    if llm_request.group.is_held:
        return False
    if llm_request.state is RequestState.WAITING:
        return llm_request.leads or llm_request.group.has_context
    return llm_request.state is RequestState.PAUSED


def _cost(llm_request: LlmRequest) -> int:
    """Return the cost of a sequence in tokens: its prompt, and all tokens that it may generate in every slot."""
    most_new = llm_request.max_length - llm_request.prompt_length
    return llm_request.prompt_length + most_new * llm_request.num_slots
