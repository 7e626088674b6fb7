"""Admission: owns the waiting queue and decides which waiting sequences start.

Admission checks slots, asks the capacity scheduler how many blocks a sequence has to reserve, the KV cache manager
how many of these blocks are cached, and the adapter pages whether the sequence's adapter fits. Used by the
scheduler, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto

from inflight.config import SchedulePolicy, SchedulingConfig
from inflight.core.kv.kv_cache_manager import KvCacheManager, PrefixMatch
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.request.request import Request
from inflight.core.schedule.capacity_scheduler import CapacityScheduler
from inflight.core.schedule.running import Running
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.errors import QueueFull

_MAX_PASSED_OVER = 64
"""Maximum number of sequences that `admit` skips, as every skipped sequence is examined again in each
iteration. Sequences that wait for saved blocks have a limit of their own."""
_MAX_LOADING = 1024
"""Maximum number of sequences that wait for saved blocks and that `admit` skips."""


class _Obstacle(Enum):
    """The obstacles to a sequence's start, in the order in which they are checked."""

    SLOTS = auto()
    TO_END = auto()
    STATIC_BATCH = auto()
    ADAPTER_PAGES = auto()
    PROMISED_BLOCK = auto()
    BLOCKS = auto()
    SAVED_BLOCKS = auto()


_PASSED_OVER = (
    _Obstacle.TO_END,
    _Obstacle.ADAPTER_PAGES,
    _Obstacle.PROMISED_BLOCK,
    _Obstacle.SAVED_BLOCKS,
)
"""Obstacles that concern one sequence only, so that later sequences may start. After any other obstacle, none
may."""


class Admission:
    """Moves sequences from waiting to running.

    Attributes:
        waiting: The waiting queue.
        held: Requests whose guides or adapters are not ready, by id: none of their sequences is in the queue yet.
        considered: The sequences that `admit` has examined, whether they started or not, since the scheduler last
            cleared this list.
    """

    def __init__(
        self,
        config: SchedulingConfig,
        capacity: CapacityScheduler,
        kv_cache: KvCacheManager,
        running: Running,
    ) -> None:
        self.waiting = WaitingQueue()
        self.held: dict[int, RequestGroup] = {}
        self.considered: list[LlmRequest] = []
        self._capacity = capacity
        self._kv_cache = kv_cache
        self._running = running
        self._config = config
        self._chosen_key = -1  # of the last sequence chosen by its cached prefix
        self._num_cached: dict[int, int] = {}  # cached blocks by sequence key, in the current call of `admit`

    def check_queue(self, request: Request) -> None:
        """Raise QueueFull if the queue is full for this request.

        Requests that fit into free slots, and requests of lower priorities, are not counted. A continuation of an
        accepted request is always accepted.
        """
        bound = self._config.max_queue_size
        if not bound or request.is_continuation:
            return
        room = bound + self._running.slots.num_free - request.sampling.num_sequences
        held = [group.request for group in self.held.values()]
        num_held = sum(each.sampling.num_sequences for each in held)
        if self.waiting.num_new_at_all + num_held <= room:
            return
        before = sum(each.sampling.num_sequences for each in held if each.priority >= request.priority)
        if self.waiting.num_new(request.priority) + before > room:
            # The first sentence comes from Triton's dynamic batcher, the second from TensorRT-LLM: clients look
            # for one or the other.
            raise QueueFull(
                "Exceeds maximum queue size. "
                f"Maximum queue size of {bound} has been reached, please try again later"
            )

    def hold(self, group: RequestGroup) -> None:
        """Keep a new request from starting until it is released."""
        self.held[group.request.request_id] = group
        self.waiting.hold(group.sequences[0])

    def release_if_ready(self, group: RequestGroup) -> None:
        """Queue a held request once it waits for neither guide nor adapter.

        If the request's first sequence has ended meanwhile, another one computes the prompt.
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
        """Queue the request's other sequences after the sequence that was to compute the prompt has ended."""
        successor = group.pass_context_on()
        if successor is not None:
            self.waiting.add_in_front(successor)
        else:
            self.queue_siblings(group)

    def queue_siblings(self, group: RequestGroup) -> None:
        """Queue the request's other sequences, now that the blocks of its prompt are cached.

        If the sequence that was to compute the prompt ended early, the next one computes the prompt, and the
        others wait for the prompt's blocks.
        """
        if group.has_context:
            return
        group.has_context = True
        for sibling in reversed(group.sequences[1:]):
            if sibling.state is RequestState.WAITING:
                self.waiting.add_in_front(sibling)

    def admit(self, claimed_blocks: int, retrying: Collection[int]) -> Iterator[tuple[LlmRequest, int]]:
        """Start waiting sequences in order, as long as slots and blocks beyond `claimed_blocks` last.

        A sequence whose prompt is being computed by a running sequence is skipped and keeps its place, as it will
        find more blocks in the cache. So is a sequence that could start, but whose next blocks are in the block
        store: they are loaded first. A sequence that is to end is skipped. A sequence whose adapter does not fit
        on the device is skipped too; the first such sequence makes a claim (`adapter_pages.py`). If `retrying` is
        not empty, only requests with these ids start.

        Yields:
            A sequence whose blocks are reserved, and the number of its tokens that these blocks already contain.
            The caller must start the sequence before asking for the next one.
        """
        if self._kv_cache.loader is not None:
            self._kv_cache.loader.begin_batch()
        self._num_cached.clear()
        passed: list[tuple[LlmRequest, bool]] = []
        num_passed = {True: 0, False: 0}  # by whether they wait for saved blocks
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
                if found is _Obstacle.SAVED_BLOCKS:
                    self._load_saved_blocks(llm_request)
                is_loading = self._awaits_saved_blocks(found, llm_request)
                most = _MAX_LOADING if is_loading else _MAX_PASSED_OVER
                if found in _PASSED_OVER and num_passed[is_loading] < most:
                    num_passed[is_loading] += 1
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
        """Return the obstacle to a sequence's start, or, if there is none, its cached prefix and the number of
        blocks to reserve.

        Args:
            llm_request: The sequence.
            is_retry: Whether requests of a failed iteration are being retried.
            is_filled: Whether a static batch is running.
            claimed: Adapters claimed by an earlier sequence.
            num_free_blocks: Number of blocks that the sequence may reserve.
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
        # A sequence that joins a static batch does not wait for a promised block, as it could not join the batch
        # after the first iteration.
        if match.is_promised and not fills_batch:
            return _Obstacle.PROMISED_BLOCK
        if needed > num_free_blocks:
            return _Obstacle.BLOCKS
        if match.is_saved and not (fills_batch or is_retry):
            return _Obstacle.SAVED_BLOCKS
        return match, num_blocks

    def _awaits_saved_blocks(self, found: _Obstacle, llm_request: LlmRequest) -> bool:
        """Return whether the sequence's obstacle is that saved blocks are, or will be, loaded."""
        if found is _Obstacle.PROMISED_BLOCK:
            return self._kv_cache.is_loading(llm_request.key)
        return found is _Obstacle.SAVED_BLOCKS

    def _load_saved_blocks(self, llm_request: LlmRequest) -> None:
        match = self.blocks_needed(llm_request)[0]
        self._kv_cache.load_saved(llm_request.key, match, llm_request.tokens, llm_request.rules)

    def _in_turn(self, retrying: Collection[int]) -> Iterator[LlmRequest]:
        """Yield sequences in order; the caller must remove each one from the queue before asking for the next.

        Retried requests ran before, so they are at the front, and no other sequence is examined.
        """
        if retrying:
            ids = set(retrying)
            yield from [r for r in self.waiting.in_front() if r.request_id in ids]
            return
        while (llm_request := self.waiting.first()) is not None:
            if self._config.schedule_policy is SchedulePolicy.LPM:
                llm_request = self._with_longest_prefix(llm_request)
            yield llm_request

    def _with_longest_prefix(self, first: LlmRequest) -> LlmRequest:
        """Return the sequence with the most cached blocks among those that may overtake `first`, and move it to
        the front; of equal ones, the first. The choice stands until it starts or is passed over."""
        if first.key == self._chosen_key or first.num_slots > self._running.slots.num_free:
            return first
        candidates = self.waiting.may_overtake(first, self._config.max_overtaken)
        chosen = max(candidates, key=self._count_cached)
        if chosen is not first:
            self.waiting.overtake(chosen)
        self._chosen_key = chosen.key
        return chosen

    def _count_cached(self, llm_request: LlmRequest) -> int:
        """Return the number of cached blocks that a sequence would use; counted once in each call of `admit`."""
        count = self._num_cached.get(llm_request.key)
        if count is None:
            count = 0
            if not llm_request.gives_context:
                count = self._kv_cache.num_cached_blocks(
                    llm_request.key, llm_request.tokens, llm_request.rules
                )
            self._num_cached[llm_request.key] = count
        return count

    def blocks_needed(self, llm_request: LlmRequest) -> tuple[PrefixMatch, int, int]:
        """Return a sequence's cached prefix, the number of blocks to reserve, and how many of these must be
        free."""
        num_blocks = self._capacity.blocks_to_reserve(llm_request, self._kv_cache.tokens_per_block)
        if llm_request.gives_context:
            match = PrefixMatch()  # every row of its context must be computed
        else:
            match = self._kv_cache.match_prefix(llm_request.key, llm_request.tokens, llm_request.rules)
        return match, num_blocks, num_blocks - match.num_held

    def why_waiting(self, llm_request: LlmRequest, retrying: Collection[int]) -> str:
        """Return the reason why a sequence waits, for people to read."""
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
            case _Obstacle.PROMISED_BLOCK if self._kv_cache.is_loading(llm_request.key):
                return "waits for KV: the next blocks of its prompt are being read from the block store"
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
