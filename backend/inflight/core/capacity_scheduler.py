"""Who may hold KV blocks: decides which requests to pause and which waiting ones to admit.

The two policies differ in one number, the tokens for which a request reserves blocks at admission:

    GUARANTEED_NO_EVICT   all it can ever need, so that growth never fails
    MAX_UTILIZATION       its context and one token; when growth finds no block, the last-started is paused

Waiting requests are admitted first come, first served, until the first that does not fit: overtaking would let
small requests starve a large one. Asks the KV cache manager, changes nothing; the scheduler applies decisions.
Reference: TensorRT-LLM `batch_scheduler_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inflight.core.config import CapacitySchedulerPolicy
from inflight.core.kv_cache_manager import KvCacheManager
from inflight.core.llm_request import LlmRequest, RequestState


@dataclass(frozen=True, slots=True)
class Growth:
    """What the running requests need to grow by one iteration.

    Attributes:
        paused: Requests to pause for it, in this order.
        num_blocks: Unreserved blocks that the others will take; not to be given to new requests.
    """

    paused: tuple[LlmRequest, ...] = ()
    num_blocks: int = 0


class CapacityScheduler(Protocol):
    """One policy."""

    def tokens_to_reserve(self, request: LlmRequest) -> int:
        """Tokens whose blocks are set aside when the request is admitted."""

    def plan_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """How the running requests, oldest first, get the blocks for their next token."""


class GuaranteedNoEvict:
    """Reserve everything at admission, pause never."""

    def tokens_to_reserve(self, request: LlmRequest) -> int:
        """Prompt and all new tokens but the last, which is never fed back."""
        return request.request.max_kv_tokens

    def plan_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Nothing to do: reservations cover all growth."""
        return Growth()


class MaxUtilization:
    """Reserve the context, pause the last-started when blocks run out. A paused request resumes by itself."""

    def tokens_to_reserve(self, request: LlmRequest) -> int:
        """The known tokens and one more, so that a resumed request gets further than it was."""
        return min(len(request.tokens) + 1, request.request.max_kv_tokens)

    def plan_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Walk from the oldest; whoever needs a block beyond its own takes it from the youngest.

        A request with tokens in flight cannot be paused; where that leaves too few blocks, the requests that
        lack one are left out of the iteration.
        """
        unreserved = kv_cache.num_unreserved
        claimed = 0
        paused: list[LlmRequest] = []
        victims: list[LlmRequest] | None = None
        for request in running:
            if request in paused:
                break
            missing = self._missing_blocks(request, kv_cache)
            if missing == 0:
                continue
            if victims is None:
                victims = [candidate for candidate in running if candidate.num_scheduled_tokens == 0]
            while missing > unreserved and victims:
                victim = victims.pop()
                paused.append(victim)
                unreserved += kv_cache.blocks_freed_by(victim.request_id)
                if victim is request:
                    break
            if missing > unreserved or request in paused:
                break
            unreserved -= missing
            claimed += missing
        return Growth(tuple(paused), claimed)

    @staticmethod
    def _missing_blocks(request: LlmRequest, kv_cache: KvCacheManager) -> int:
        """Blocks beyond its reservation for the next generated token; only at a block's start is there one."""
        position = request.next_position
        if position % kv_cache.tokens_per_block or position >= request.request.max_kv_tokens:
            return 0
        if request.state is RequestState.FINISHED:
            return 0
        return 0 if request.in_context else kv_cache.missing_blocks(request.request_id, position + 1)


def make_capacity_scheduler(policy: CapacitySchedulerPolicy) -> CapacityScheduler:
    """The scheduler of a policy."""
    if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        return MaxUtilization()
    return GuaranteedNoEvict()
