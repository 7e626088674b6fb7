"""Decides who may start: owns the waiting queue, and checks that slots and KV blocks suffice for the first in it.

It asks the capacity scheduler how much a sequence has to reserve, the KV cache manager what of it is there
already, and the pages for adapters whether its adapter has room. The scheduler calls it, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto

from inflight.core.kv.kv_cache_manager import KvCacheManager, PrefixMatch
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.request.request import Request
from inflight.core.schedule.capacity_scheduler import CapacityScheduler
from inflight.core.schedule.running import Running
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.errors import QueueFull

_MOST_PASSED_OVER = 64
"""Most sequences that `admit` passes over: each of them is looked at again in every iteration."""


class _Obstacle(Enum):
    """The first thing that keeps a sequence from starting, in the order in which it is looked for."""

    SLOTS = auto()
    TO_END = auto()
    STATIC_BATCH = auto()
    ADAPTER_PAGES = auto()
    PROMISED_BLOCK = auto()
    BLOCKS = auto()


_PASSED_OVER = _Obstacle.TO_END, _Obstacle.ADAPTER_PAGES, _Obstacle.PROMISED_BLOCK
"""Obstacles of one sequence alone: those behind it may start. Behind the other obstacles nobody starts."""


class Admission:
    """Moves sequences from waiting to running.

    Attributes:
        waiting: The waiting queue.
        held: Requests whose guides or adapters are not ready, by id: none of their sequences is in the queue yet.
        considered: The sequences that `admit` looked at, let in or not, since the scheduler cleared this.
    """

    def __init__(
        self, capacity: CapacityScheduler, kv_cache: KvCacheManager, running: Running, max_queue_size: int
    ) -> None:
        self.waiting = WaitingQueue()
        self.held: dict[int, RequestGroup] = {}
        self.considered: list[LlmRequest] = []
        self._capacity = capacity
        self._kv_cache = kv_cache
        self._running = running
        self._max_queue_size = max_queue_size

    def check_queue(self, request: Request) -> None:
        """Raise QueueFull if the queue is full for this request.

        Requests that fit into free slots, and those of lower priorities, do not count. What continues a request
        that was let in is let in itself.
        """
        bound = self._max_queue_size
        if not bound or request.is_continuation:
            return
        room = bound + self._running.slots.num_free - request.sampling.num_sequences
        held = [group.request for group in self.held.values()]
        num_held = sum(each.sampling.num_sequences for each in held)
        if self.waiting.num_new_at_all + num_held <= room:
            return
        before = sum(each.sampling.num_sequences for each in held if each.priority >= request.priority)
        if self.waiting.num_new(request.priority) + before > room:
            # The first sentence is Triton's own, of its dynamic batcher, the second TensorRT-LLM's: clients look
            # for either.
            raise QueueFull(
                "Exceeds maximum queue size. "
                f"Maximum queue size of {bound} has been reached, please try again later"
            )

    def hold(self, group: RequestGroup) -> None:
        """Keep a new request from starting until it is released."""
        self.held[group.request.request_id] = group
        self.waiting.hold(group.sequences[0])

    def release_if_ready(self, group: RequestGroup) -> None:
        """Queue a request that was held, if it waits for neither guide nor adapter any more.

        If its first sequence has ended since, another computes the prompt.
        """
        if group.is_held:
            return
        del self.held[group.request.request_id]
        first = group.sequences[0]
        if first.state is RequestState.WAITING:
            self.waiting.add(first, was_held=True)
        else:
            self.pass_prompt_on(group)

    def pass_prompt_on(self, group: RequestGroup) -> None:
        """Go on with the request's other sequences, as the one that was to compute the prompt has ended."""
        successor = group.pass_context_on()
        if successor is not None:
            self.waiting.add_in_front(successor)
        else:
            self.queue_siblings(group)

    def queue_siblings(self, group: RequestGroup) -> None:
        """Queue the request's other sequences, now that its prompt is computed and its full blocks can be found.

        If the sequence that was to compute the prompt ended before, the next one computes it, and the others wait
        for its blocks.
        """
        if group.has_context:
            return
        group.has_context = True
        for sibling in reversed(group.sequences[1:]):
            if sibling.state is RequestState.WAITING:
                self.waiting.add_in_front(sibling)

    def admit(self, claimed_blocks: int, retrying: Collection[int]) -> Iterator[tuple[LlmRequest, int]]:
        """Let sequences in, in order, while slots and blocks beyond `claimed_blocks` last.

        A sequence whose prompt a running sequence is just computing is passed over, and is the first again the
        next time: it will find more in the cache. So is one that is to end, and one whose adapter has no room on
        the device; the first of the latter has a claim on it (`adapter_pages.py`). If requests are `retrying`, no
        others are let in.

        Yields:
            A sequence whose blocks are set aside, to be started before the next is asked for, and how many of its
            tokens they hold already.
        """
        passed: list[tuple[LlmRequest, bool]] = []
        is_filled = bool(self._running.sequences)
        pages, claimed = self._running.adapter_pages, None
        for llm_request in self._in_turn(retrying):
            self.considered.append(llm_request)
            num_free = self._kv_cache.num_unreserved - claimed_blocks
            found = self._obstacle(llm_request, bool(retrying), is_filled, claimed, num_free)
            if isinstance(found, _Obstacle):
                if found is _Obstacle.ADAPTER_PAGES and claimed is None:
                    assert llm_request.group.adapter is not None
                    claimed = pages.claim(llm_request.group.adapter)
                if found in _PASSED_OVER and len(passed) < _MOST_PASSED_OVER:
                    passed.append((llm_request, bool(self.waiting.remove(llm_request))))
                    continue
                break
            match, num_blocks = found
            self.waiting.remove(llm_request)
            num_tokens = len(llm_request.tokens)
            self._kv_cache.admit(llm_request.key, match, num_blocks, llm_request.rules, num_tokens)
            if not llm_request.has_started:
                self.waiting.charge(llm_request)
            num_tokens = len(match.block_ids) * self._kv_cache.tokens_per_block
            yield llm_request, num_tokens + match.num_copied_tokens
        for llm_request, was_in_front in reversed(passed):
            self.waiting.put_back(llm_request, was_in_front)

    def _obstacle(
        self,
        llm_request: LlmRequest,
        is_retry: bool,
        is_filled: bool,
        claimed: Collection[int] | None,
        num_free_blocks: int,
    ) -> _Obstacle | tuple[PrefixMatch, int]:
        """Name the obstacle of a sequence; if there is none, return its cached prefix and the blocks it reserves.

        Args:
            llm_request: The sequence.
            is_retry: Whether the requests of an iteration that failed are tried again.
            is_filled: Whether a static batch is running.
            claimed: Adapters that a sequence before it has claimed.
            num_free_blocks: Blocks that it may reserve.
        """
        group = llm_request.group
        if llm_request.num_slots > self._running.slots.num_free:
            return _Obstacle.SLOTS
        if group.is_to_end and not is_retry:
            return _Obstacle.TO_END
        fills_batch = self._capacity.fills_batches_once and _is_new(llm_request)
        if fills_batch and is_filled:
            return _Obstacle.STATIC_BATCH
        if group.adapter is not None and not self._running.adapter_pages.may_start(group.adapter, claimed):
            return _Obstacle.ADAPTER_PAGES
        match, num_blocks, needed = self.blocks_needed(llm_request)
        # Who is to fill a static batch does not wait for a prompt: it would wait for the end of the batch.
        if match.is_promised and not fills_batch:
            return _Obstacle.PROMISED_BLOCK
        return _Obstacle.BLOCKS if needed > num_free_blocks else (match, num_blocks)

    def _in_turn(self, retrying: Collection[int]) -> Iterator[LlmRequest]:
        """Sequences in the order of their turns, if each is removed from the queue before the next is asked for.

        Requests that are retried ran before, so they are in front, and nobody else needs to be looked at.
        """
        if retrying:
            ids = set(retrying)
            yield from [r for r in self.waiting.in_front() if r.request_id in ids]
            return
        while (llm_request := self.waiting.first()) is not None:
            yield llm_request

    def blocks_needed(self, llm_request: LlmRequest) -> tuple[PrefixMatch, int, int]:
        """A sequence's cached prefix, the blocks that it reserves, and how many of these must be free."""
        num_blocks = self._capacity.blocks_to_reserve(llm_request, self._kv_cache.tokens_per_block)
        if llm_request.gives_context:
            match = PrefixMatch()  # every row of its context is wanted
        else:
            match = self._kv_cache.match_prefix(llm_request.key, llm_request.tokens, llm_request.rules)
        return match, num_blocks, num_blocks - match.num_held

    def why_waiting(self, llm_request: LlmRequest, retrying: Collection[int]) -> str:
        """A sentence for people that says what a sequence waits for."""
        if retrying and llm_request.request_id not in retrying:
            return "an iteration failed: the requests that were in it are tried again apart"
        slots, pages = self._running.slots, self._running.adapter_pages
        num_free = self._kv_cache.num_unreserved
        match self._obstacle(llm_request, bool(retrying), bool(self._running.sequences), None, num_free):
            case _Obstacle.SLOTS:
                return f"needs {_count(llm_request.num_slots, 'slot')}, {slots.num_free} free"
            case _Obstacle.TO_END:
                return "is to end"
            case _Obstacle.STATIC_BATCH:
                return "static batching: waits for the end of the batch that runs"
            case _Obstacle.ADAPTER_PAGES:
                assert llm_request.group.adapter is not None
                num_pages = _count(pages.num_pages(llm_request.group.adapter), "page")
                return f"its adapter needs {num_pages} on the device, {pages.num_free} free"
            case _Obstacle.PROMISED_BLOCK:
                return "a running request is computing the next block of its prompt"
            case _Obstacle.BLOCKS:
                return f"needs {_count(self.blocks_needed(llm_request)[2], 'block')}, {num_free} free"
            case _:
                pass
        first = self.waiting.first()
        if first is not None and first is not llm_request:
            return f"is behind request {first.request_id}"
        return "starts with the next iteration"


def _is_new(llm_request: LlmRequest) -> bool:
    return llm_request.state is RequestState.WAITING and llm_request.sequence_index == 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
