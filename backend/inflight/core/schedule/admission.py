"""Decides who may start: owns the waiting queue, and checks that slots and KV blocks suffice for the first in it.

It asks the capacity scheduler how much a sequence has to reserve, the KV cache manager what of it is there
already, and the pages for adapters whether its adapter has room. The scheduler calls it, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from inflight.core.kv.kv_cache_manager import KvCacheManager, PrefixMatch
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.request.request import Request
from inflight.core.schedule.capacity_scheduler import CapacityScheduler
from inflight.core.schedule.running import Running
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.errors import Unavailable

_MOST_PASSED_OVER = 64
"""Most sequences that `admit` passes over: each of them is looked at again in every iteration."""


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
        """Raise Unavailable if the queue is full for this request.

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
            raise Unavailable(
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
            if llm_request.num_slots > self._running.slots.num_free:
                break
            if llm_request.group.is_to_end and not retrying:
                if not self._pass_over(llm_request, passed):
                    break
                continue
            # Who is to fill a static batch does not wait for a prompt: it would wait for the end of the batch.
            fills_batch = self._capacity.fills_batches_once and _is_new(llm_request)
            if fills_batch and is_filled:
                break
            adapter = llm_request.group.adapter
            if adapter is not None and not pages.may_start(adapter, claimed):
                if claimed is None:
                    claimed = pages.claim(adapter)
                if not self._pass_over(llm_request, passed):
                    break
                continue
            match, num_blocks, needed = self.blocks_needed(llm_request)
            if match.is_promised and not fills_batch:
                if not self._pass_over(llm_request, passed):
                    break
                continue
            if needed > self._kv_cache.num_unreserved - claimed_blocks:
                break
            self.waiting.remove(llm_request)
            num_tokens = len(llm_request.tokens)
            self._kv_cache.admit(llm_request.key, match, num_blocks, llm_request.rules, num_tokens)
            if not llm_request.has_started:
                self.waiting.charge(llm_request)
            num_tokens = len(match.block_ids) * self._kv_cache.tokens_per_block
            yield llm_request, num_tokens + match.num_copied_tokens
        for llm_request, was_in_front in reversed(passed):
            self.waiting.put_back(llm_request, was_in_front)

    def _pass_over(self, llm_request: LlmRequest, passed: list[tuple[LlmRequest, bool]]) -> bool:
        """Take a sequence out of the queue until admission ends; False if as many as may be were passed over."""
        if len(passed) >= _MOST_PASSED_OVER:
            return False
        passed.append((llm_request, bool(self.waiting.remove(llm_request))))
        return True

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
        """What the cache holds of a sequence, how many blocks it reserves, and how many of them must be free."""
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
        free_slots = self._running.slots.num_free
        if llm_request.num_slots > free_slots:
            return f"needs {_count(llm_request.num_slots, 'slot')}, {free_slots} free"
        if self._capacity.fills_batches_once and self._running.sequences and _is_new(llm_request):
            return "static batching: waits for the end of the batch that runs"
        adapter, pages = llm_request.group.adapter, self._running.adapter_pages
        if adapter is not None and not pages.may_start(adapter, None):
            num_pages = _count(pages.num_pages(adapter), "page")
            return f"its adapter needs {num_pages} on the device, {pages.num_free} free"
        if llm_request.group.is_to_end:
            return "is to end"
        match, _, needed = self.blocks_needed(llm_request)
        if match.is_promised:
            return "a running request is computing the next block of its prompt"
        free = self._kv_cache.num_unreserved
        if needed > free:
            return f"needs {_count(needed, 'block')}, {free} free"
        first = self.waiting.first()
        if first is not None and first is not llm_request:
            return f"is behind request {first.request_id}"
        return "starts with the next iteration"


def _is_new(llm_request: LlmRequest) -> bool:
    return llm_request.state is RequestState.WAITING and llm_request.sequence_index == 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
