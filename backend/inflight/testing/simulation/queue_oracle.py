"""Oracle of admission: checks the order in which a scheduler starts sequences.

It follows the rules of `waiting_queue.py`, and counts the tokens that every client was served on its own. When a
sequence is admitted, every waiting sequence before it in the order must have a reason to wait. When admission
ends, the first sequence in the order must lack slots or blocks. With the policy LPM, the order of a client's
requests is certain only for those that were overtaken as often as they may be. The code is quadratic in the
number of requests.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from inflight.config import CapacityPolicy, SchedulePolicy, SchedulingConfig
from inflight.core.request.adapter import AdapterEvent
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.request.request import Request
from inflight.core.scheduler import Scheduler

from .cache_oracle import CacheOracle


def sequences_of(scheduler: Scheduler) -> list[LlmRequest]:
    """Return all sequences of requests that have had no final response."""
    return [sequence for group in scheduler._groups.values() for sequence in group.sequences]


class Shares:
    """Tokens that clients were served: a naive start-time fair queueing."""

    def __init__(self) -> None:
        self._settled: dict[int, int] = {}  # tokens of sequences that have ended, by client
        self._promised: Counter[int] = Counter()  # cost of running sequences, by client
        self._present: Counter[int] = Counter()
        self._queued: Counter[int] = Counter()  # sequences by client that have never run
        self._away: dict[int, int] = {}
        self._virtual_time = 0

    def served(self, client: int) -> int:
        """Return the tokens that decide a client's turn."""
        return self._settled[client] + self._promised[client]

    def hold(self, client: int) -> None:
        """Count a request of a client that is not queued yet, such as one that waits for its adapter."""
        self._enter(client)

    def queue(self, client: int) -> None:
        """Count a request of a client that starts to wait in the queue.

        A client without waiting requests enters at the current virtual time, or its own if later.
        """
        if not self._queued[client]:
            self._settled[client] = max(self._settled[client], self._virtual_time)
        self._queued[client] += 1

    def _enter(self, client: int) -> None:
        if not self._present[client]:
            self._settled[client] = max(self._virtual_time, self._away.pop(client, 0))
        self._present[client] += 1

    def charge(self, llm_request: LlmRequest) -> None:
        """Charge a sequence that starts for the first time."""
        request = llm_request.request
        if llm_request.sequence_index:
            self._enter(request.client_id)
        else:
            self._queued[request.client_id] -= 1
        self._virtual_time = max(self._virtual_time, self._settled[request.client_id])
        self._promised[request.client_id] += cost_of(request)

    def leave(self, llm_request: LlmRequest, has_started: bool) -> None:
        """Credit a sequence that ran and has ended."""
        request = llm_request.request
        client = request.client_id
        assert has_started, "it was charged nothing"
        unused = request.max_new_tokens - llm_request.num_generated
        self._promised[client] -= cost_of(request)
        self._settled[client] += cost_of(request) - unused * request.sampling.beam_width
        self._depart(client)

    def give_up(self, client: int, was_queued: bool = True) -> None:
        """Drop a request that has ended without having run."""
        self._queued[client] -= was_queued
        self._depart(client)

    def _depart(self, client: int) -> None:
        """Remove one of a client's sequences; without any sequence all accounts are reset."""
        self._present[client] -= 1
        if not self._present[client]:
            self._away[client] = self._settled.pop(client)
        if not self._present.total():
            self._away.clear()


def cost_of(request: Request) -> int:
    """Return the tokens that a client is charged when one of its sequences starts."""
    return request.prompt_length + request.max_new_tokens * request.sampling.beam_width


class QueueOracle:
    """Oracle of one scheduler's admissions, wrapped around its method `admit`.

    Args:
        scheduler: The scheduler.
        config: Its configuration.
        cache: The cache's oracle, which knows which sequences may wait for another one's prompt.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: SchedulingConfig,
        cache: CacheOracle,
    ) -> None:
        self.shares = Shares()
        self.num_adapter_waits = 0  # how often admission left a sequence waiting for adapter pages
        self.starts: list[LlmRequest] = []  # sequences in the order of their first start
        self.ended: list[LlmRequest] = []
        self._scheduler = scheduler
        self._config = config
        self._cache = cache
        # By sequence key; without starts while the sequence was delayed.
        self._overtaken: Counter[int] = Counter()
        self._started: set[int] = set()  # sequence keys
        self._present: dict[int, LlmRequest] = {}
        self._held: dict[int, Request] = {}  # by request id
        self._queued_at: dict[int, int] = {}  # place of each request id among all that were queued
        self._is_lpm = config.schedule_policy is SchedulePolicy.LPM
        self._admit = scheduler._admission.admit
        scheduler._admission.admit = self._watched_admit

    # ---------------------------------------------------------------- arrivals and ends

    def too_many(self, requests: Collection[Request]) -> set[int]:
        """Return the ids of the new requests that must be refused because the queue is full."""
        bound = self._config.max_queue_size
        waiting = [r.request for r in self._waiting() if _is_new(r)]
        waiting += [
            request for request in self._held.values() if self._scheduler.is_active(request.request_id)
        ]
        refused: set[int] = set()
        for request in requests:
            ahead = [other for other in waiting if other.priority >= request.priority]
            count = sum(other.sampling.num_sequences for other in (*ahead, request))
            if bound and count > bound + self._free_slots():
                refused.add(request.request_id)
            else:
                waiting.append(request)
        return refused

    def accepted(self, requests: Collection[Request], events: Collection[AdapterEvent]) -> None:
        """Record new requests, which are queued or wait for adapters, and the adapters that have arrived.

        Some of the requests may have ended already.
        """
        first = {r.request_id: r for r in sequences_of(self._scheduler) if r.sequence_index == 0}
        for request in requests:
            self.shares.hold(request.client_id)
            if request.lora is None:
                self._queue(request)
            else:
                self._held[request.request_id] = request
            if request.request_id in first:
                self._present[first[request.request_id].key] = first[request.request_id]
        for event in events:
            request = self._held.get(event.request_id)
            if request is not None and event.request_id in self._cache.adapters:
                del self._held[event.request_id]
                leader = first.get(event.request_id)
                if leader is None or leader.key in self._present:  # else another sequence computes the prompt
                    self._queue(request)
        for request in requests:
            if request.request_id not in first:
                self._give_up(request)

    def _queue(self, request: Request) -> None:
        self._queued_at[request.request_id] = len(self._queued_at)
        self.shares.queue(request.client_id)

    def _give_up(self, request: Request) -> None:
        self._held.pop(request.request_id, None)
        self.shares.give_up(request.client_id, request.request_id in self._queued_at)

    def settle(self) -> None:
        """Credit ended sequences for tokens that they did not generate; called after every call."""
        for llm_request in list(self._present.values()):
            if llm_request.state is RequestState.FINISHED and not llm_request.slots:
                del self._present[llm_request.key]
                self.ended.append(llm_request)
                if llm_request.key in self._started:
                    self.shares.leave(llm_request, True)
                else:
                    self.shares.give_up(
                        llm_request.request.client_id, llm_request.request_id in self._queued_at
                    )

    # ---------------------------------------------------------------- starts

    def _watched_admit(
        self, claimed_blocks: int, retrying: Collection[int]
    ) -> Iterator[tuple[LlmRequest, int]]:
        policy = self._config.policy
        is_closed = policy is CapacityPolicy.STATIC_BATCH and bool(self._scheduler.running_sequences)
        if policy is not CapacityPolicy.MAX_UTILIZATION:
            assert claimed_blocks == 0, "blocks were claimed that reservations cover"
        for llm_request, num_reused in self._admit(claimed_blocks, retrying):
            assert not (is_closed and _is_new(llm_request)), "a static batch was joined"
            assert retrying or not self._is_to_end(llm_request), (
                "a sequence started though its request's end was pending"
            )
            self._check_turn(llm_request, retrying)
            self._count_overtaken(llm_request, retrying)
            if llm_request.key not in self._started:
                self._started.add(llm_request.key)
                self._present[llm_request.key] = llm_request
                self.starts.append(llm_request)
                self.shares.charge(llm_request)
            self._cache.admitted(llm_request, num_reused)
            yield llm_request, num_reused
        self._check_end(claimed_blocks, retrying, is_closed)

    def _check_turn(self, llm_request: LlmRequest, retrying: Collection[int]) -> None:
        assert not retrying or llm_request.request_id in retrying, (
            "a sequence started that is not being retried, while others are"
        )
        for other in self._waiting():
            if other is llm_request or not self._precedes(other, llm_request):
                continue
            excused = retrying and other.request_id not in retrying
            assert excused or self._is_delayed(other, retrying), (
                f"request {other.request_id} was overtaken by request {llm_request.request_id}"
            )
            adapter = llm_request.group.adapter
            waits = self._lacks_pages(other) and (bool(retrying) or not self._is_to_end(other))
            assert excused or adapter is None or not waits or adapter.handle in self._in_use(), (
                f"request {llm_request.request_id} takes adapter pages that request {other.request_id} waits for"
            )

    def _count_overtaken(self, llm_request: LlmRequest, retrying: Collection[int]) -> None:
        """Count a start for the earlier requests of its client and priority that had no reason to wait."""
        if llm_request.key in self._started or llm_request.sequence_index:
            return
        request = llm_request.request
        for other in self._waiting():
            if (
                other is not llm_request
                and _is_new(other)
                and (other.request.client_id, other.request.priority) == (request.client_id, request.priority)
                and self._queued_at[other.request_id] < self._queued_at[request.request_id]
                and not self._is_delayed(other, retrying)
            ):
                self._overtaken[other.key] += 1

    def _check_end(self, claimed_blocks: int, retrying: Collection[int], is_closed: bool) -> None:
        waiting = self._waiting()
        self._cache.check_promises(waiting)
        allowed = [r for r in waiting if not retrying or r.request_id in retrying]
        self.num_adapter_waits += any(map(self._lacks_pages, allowed))
        # A new request that a static batch keeps out lets no other sequence start, whatever else delays it.
        undelayed = [r for r in allowed if (is_closed and _is_new(r)) or not self._is_delayed(r, retrying)]
        first = [r for r in undelayed if not any(self._precedes(other, r) for other in undelayed)]
        if not first or not all(self._fits(r, claimed_blocks, is_closed) for r in first):
            return
        # A request that lacks slots is not checked for other delays. With LPM, a request that lacks blocks
        # keeps others waiting too, unless it is certain that its adapter delays it.
        free_slots = self._free_slots()
        lacking = [
            r
            for r in allowed
            if r.num_slots > free_slots
            or (
                self._is_lpm
                and self._may_be_claimed(r, retrying)
                and not self._fits(r, claimed_blocks, is_closed)
            )
        ]
        in_the_way = [r for r in lacking if not any(self._precedes(one, r) for one in first)]
        assert in_the_way, f"request {first[0].request_id} could have started"

    def _precedes(self, one: LlmRequest, other: LlmRequest) -> bool:
        """Whether the first sequence certainly precedes the second."""
        if one.request.priority != other.request.priority:
            return one.request.priority > other.request.priority
        if _is_new(one) != _is_new(other):
            return _is_new(other)
        if not _is_new(one):
            never_ran = one.state is other.state is RequestState.WAITING
            return never_ran and one.group is other.group and one.key < other.key
        clients = one.request.client_id, other.request.client_id
        if clients[0] == clients[1]:
            is_certain = not self._is_lpm or self._overtaken[one.key] >= self._config.max_overtaken
            return is_certain and self._queued_at[one.request_id] < self._queued_at[other.request_id]
        served = [self.shares.served(client) for client in clients]
        if served[0] == served[1]:
            return not self._is_lpm and one.key < other.key and self._queued_in_order()
        return served[0] < served[1]

    def _queued_in_order(self) -> bool:
        """Whether all requests were queued in order of their ids.

        Only then is it certain that clients with equal accounts start in that order.
        """
        return list(self._queued_at) == sorted(self._queued_at)

    def _fits(self, llm_request: LlmRequest, claimed_blocks: int, is_closed: bool) -> bool:
        if is_closed and _is_new(llm_request):
            return False
        kv_cache = self._scheduler.kv_cache
        matched: tuple[int, ...] = ()
        if not llm_request.gives_context:
            match = kv_cache.match_prefix(llm_request.key, llm_request.tokens, llm_request.rules)
            matched = match.block_ids
        num_held = sum(map(kv_cache.pool.is_held, matched))
        needed = self._blocks_to_reserve(llm_request) - num_held
        enough = needed <= kv_cache.num_unreserved - claimed_blocks
        return enough and llm_request.num_slots <= self._free_slots()

    def _blocks_to_reserve(self, llm_request: LlmRequest) -> int:
        request, size = llm_request.request, self._scheduler.kv_cache.tokens_per_block
        to_its_end = self._config.policy is not CapacityPolicy.MAX_UTILIZATION
        if to_its_end or request.sampling.uses_beams:
            return request.max_kv_blocks(size)
        soon = len(llm_request.tokens) + max(1, llm_request.draft_length)
        return -(-min(soon, request.max_kv_tokens) // size)

    # ---------------------------------------------------------------- delays

    def _is_delayed(self, llm_request: LlmRequest, retrying: Collection[int]) -> bool:
        """Return whether a sequence has a reason to wait.

        There are three reasons: its request's end is pending; its adapter does not fit, or an earlier request
        waits for adapter pages; another sequence computes its prompt. The last one does not count for a new
        request if batches are static, because the batch would be over by then.
        """
        if self._is_to_end(llm_request):
            return True
        if self._lacks_pages(llm_request):
            return True
        if self._may_be_claimed(llm_request, retrying):
            return True
        is_static = self._config.policy is CapacityPolicy.STATIC_BATCH
        return not (is_static and _is_new(llm_request)) and self._cache.is_promised(llm_request)

    def _may_be_claimed(self, llm_request: LlmRequest, retrying: Collection[int]) -> bool:
        """Whether an earlier request that waits for adapter pages may have claimed the sequence's adapter."""
        return llm_request.group.adapter is not None and any(
            self._lacks_pages(other) and not self._precedes(llm_request, other)
            for other in self._waiting()
            if not retrying or other.request_id in retrying
        )

    def _is_to_end(self, llm_request: LlmRequest) -> bool:
        """Whether its request was stopped or is past its deadline, and its end is pending."""
        pending = self._scheduler._to_end._queue
        return any(group is llm_request.group and index is None for group, index, _ in pending)

    def _lacks_pages(self, llm_request: LlmRequest) -> bool:
        """Whether its adapter is not on the device and does not fit."""
        adapter = llm_request.group.adapter
        return adapter is not None and not self._scheduler._running.adapter_pages.may_start(adapter, None)

    def _in_use(self) -> set[int]:
        """Return the handles of running sequences' adapters."""
        running = self._scheduler.running_sequences
        return {r.group.adapter.handle for r in running if r.group.adapter is not None}

    def _waiting(self) -> list[LlmRequest]:
        """Return the sequences that may start when there is room.

        Further sequences of a request are not among them until its first sequence has computed the prompt.
        """
        return [
            llm_request
            for llm_request in sequences_of(self._scheduler)
            if llm_request.request_id not in self._held
            if llm_request.state is RequestState.PAUSED
            or (llm_request.state is RequestState.WAITING and _has_prompt(llm_request))
        ]

    def _free_slots(self) -> int:
        taken = sum(r.num_slots for r in self._scheduler.running_sequences)
        return self._scheduler._running.slots.count - taken


def _is_new(llm_request: LlmRequest) -> bool:
    return llm_request.state is RequestState.WAITING and llm_request.sequence_index == 0


def _has_prompt(llm_request: LlmRequest) -> bool:
    """Whether its request's prompt is computed, or no other sequence will compute it."""
    leader = llm_request.group.sequences[llm_request.group.context_index]
    return leader is llm_request or leader.state is RequestState.FINISHED or leader.num_generated > 0
