"""Decides how KV blocks are shared out: how many a new sequence reserves, and which sequences are paused.

The two policies differ in one number, the blocks that a sequence reserves at admission:

    GUARANTEED_NO_EVICT   all it can ever need, so that growth never fails
    MAX_UTILIZATION       its context and one token; when growth finds no block, the last-started is paused

STATIC_BATCH reserves like GUARANTEED_NO_EVICT, and admits only when nothing runs. Requests of lower priority are
paused first. Under either policy a beam search reserves all it can ever need and is never paused, because its
beams would have to be recomputed one by one.

Waiting requests are admitted in order, up to the first that does not fit: with overtaking, small requests could
starve a large one. The policies query the KV cache manager and change nothing; the scheduler applies their
decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.config import CapacityPolicy
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.request.llm_request import LlmRequest, RequestState


@dataclass(frozen=True, slots=True)
class Growth:
    """How the running requests grow by one iteration.

    Attributes:
        paused: Requests to pause, in this order.
        num_blocks: Unreserved blocks that the other requests will take, so that new requests must not.
        is_short: Whether there are too few blocks for all requests.
    """

    paused: tuple[LlmRequest, ...] = ()
    num_blocks: int = 0
    is_short: bool = False


class GuaranteedNoEvict:
    """Reserves at admission all that a sequence can ever need, and never pauses one.

    Args:
        fills_batches_once: Whether requests are admitted only when none runs (static batching, V1).
    """

    def __init__(self, fills_batches_once: bool = False) -> None:
        self.fills_batches_once = fills_batches_once

    def blocks_to_reserve(self, request: LlmRequest, tokens_per_block: int) -> int:
        """Return the blocks to reserve at admission: for all tokens but the last generated one, which is never fed
        back."""
        return request.request.max_kv_blocks(tokens_per_block)

    def decide_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Decide on no change: reservations cover all growth."""
        return Growth()


class MaxUtilization:
    """Reserves a sequence's context, and pauses the sequence started last when blocks run out; it resumes
    later."""

    fills_batches_once = False

    def blocks_to_reserve(self, request: LlmRequest, tokens_per_block: int) -> int:
        """Return the blocks to reserve at admission: for the known tokens, the draft and one more token, so that a
        resumed sequence makes progress.
        """
        if request.beams is not None:
            return request.request.max_kv_blocks(tokens_per_block)
        num_tokens = min(len(request.tokens) + max(1, request.draft_length), request.request.max_kv_tokens)
        return -(-num_tokens // tokens_per_block)

    def decide_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Decide how the running sequences, oldest first, get blocks for their next token.

        Sequences are served by priority, oldest first. If there is no free block for one, the sequence of the
        lowest priority that started last is paused.

        A request with tokens in flight cannot be paused. If that leaves too few blocks, the requests that lack one
        are left out of the iteration.
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
        """Return the blocks needed beyond the reservation for the next token: one at the start of a block, else
        none."""
        position = request.next_position
        if position % kv_cache.tokens_per_block or position >= request.request.max_kv_tokens:
            return 0
        if request.state is RequestState.FINISHED or request.in_context or request.beams is not None:
            return 0
        return kv_cache.missing_blocks(request.key, position + 1)


CapacityScheduler = GuaranteedNoEvict | MaxUtilization


def make_capacity_scheduler(policy: CapacityPolicy) -> CapacityScheduler:
    """Return the capacity scheduler for a policy."""
    if policy is CapacityPolicy.MAX_UTILIZATION:
        return MaxUtilization()
    return GuaranteedNoEvict(fills_batches_once=policy is CapacityPolicy.STATIC_BATCH)
