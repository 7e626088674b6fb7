"""Who may hold KV blocks: decides which requests to pause and which waiting ones to admit.

The two policies differ in one number, the blocks that a sequence reserves at admission:

    GUARANTEED_NO_EVICT   all it can ever need, so that growth never fails
    MAX_UTILIZATION       its context and one token; when growth finds no block, the last-started is paused

STATIC_BATCH reserves as GUARANTEED_NO_EVICT does, and admits only when nothing runs. Among requests of
different priorities, lower ones are paused first. A beam search reserves all it can ever need under either, and
is never paused: its beams would have to be computed again one by one.

Waiting requests are admitted in their order, until the first that does not fit: overtaking would let small
requests starve a large one. Asks the KV cache manager, changes nothing; the scheduler applies decisions.
Reference: TensorRT-LLM `batch_scheduler_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inflight.config import CapacitySchedulerPolicy
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.request.llm_request import LlmRequest, RequestState


@dataclass(frozen=True, slots=True)
class Growth:
    """What the running requests need to grow by one iteration.

    Attributes:
        paused: Requests to pause for it, in this order.
        num_blocks: Unreserved blocks that the others will take; not to be given to new requests.
        is_short: Whether there are too few blocks for all.
    """

    paused: tuple[LlmRequest, ...] = ()
    num_blocks: int = 0
    is_short: bool = False


class CapacityScheduler(Protocol):
    """One policy."""

    @property
    def fills_batches_once(self) -> bool:
        """Whether requests are admitted only when none runs."""

    def blocks_to_reserve(self, request: LlmRequest, tokens_per_block: int) -> int:
        """Blocks that are set aside when the sequence is admitted, shared ones included."""

    def plan_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """How the running requests, oldest first, get the blocks for their next token."""


class GuaranteedNoEvict:
    """Reserve everything at admission, pause never.

    Args:
        fills_batches_once: V1 batching.
    """

    def __init__(self, fills_batches_once: bool = False) -> None:
        self.fills_batches_once = fills_batches_once

    def blocks_to_reserve(self, request: LlmRequest, tokens_per_block: int) -> int:
        """For the prompt and all new tokens but the last, which is never fed back."""
        return request.request.max_kv_blocks(tokens_per_block)

    def plan_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Nothing to do: reservations cover all growth."""
        return Growth()


class MaxUtilization:
    """Reserve the context, pause the last-started when blocks run out. A paused request resumes by itself."""

    fills_batches_once = False

    def blocks_to_reserve(self, request: LlmRequest, tokens_per_block: int) -> int:
        """For the known tokens, its draft, and one more, so that a resumed sequence gets further than it was."""
        if request.beams is not None:
            return request.request.max_kv_blocks(tokens_per_block)
        num_tokens = min(len(request.tokens) + max(1, request.draft_length), request.request.max_kv_tokens)
        return -(-num_tokens // tokens_per_block)

    def plan_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Walk from the oldest of the highest priority; who needs a block takes it from the other end.

        A request with tokens in flight cannot be paused; where that leaves too few blocks, the requests that
        lack one are left out of the iteration.
        """
        growing = [(r, missing) for r in running if (missing := self._missing_blocks(r, kv_cache))]
        unreserved = kv_cache.num_unreserved
        claimed = sum(missing for _, missing in growing)
        if claimed <= unreserved:
            return Growth(num_blocks=claimed)
        growing.sort(key=lambda pair: -pair[0].request.priority)  # stable: oldest first within a priority
        victims = [r for r in running if r.num_scheduled_tokens == 0 and r.beams is None]
        victims.sort(key=lambda r: -r.request.priority)
        claimed = 0
        paused: list[LlmRequest] = []
        for request, missing in growing:
            if request in paused:
                continue
            while missing > unreserved and victims:
                victim = victims.pop()
                paused.append(victim)
                unreserved += kv_cache.blocks_freed_by(victim.key)
                if victim is request:
                    break
            if missing > unreserved or request in paused:
                break
            unreserved -= missing
            claimed += missing
        return Growth(tuple(paused), claimed, is_short=True)

    @staticmethod
    def _missing_blocks(request: LlmRequest, kv_cache: KvCacheManager) -> int:
        """Blocks beyond its reservation for the next generated token; only at a block's start is there one."""
        position = request.next_position
        if position % kv_cache.tokens_per_block or position >= request.request.max_kv_tokens:
            return 0
        if request.state is RequestState.FINISHED or request.in_context or request.beams is not None:
            return 0
        return kv_cache.missing_blocks(request.key, position + 1)


def make_capacity_scheduler(policy: CapacitySchedulerPolicy) -> CapacityScheduler:
    """The scheduler of a policy."""
    if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        return MaxUtilization()
    return GuaranteedNoEvict(fills_batches_once=policy is CapacitySchedulerPolicy.STATIC_BATCH)
