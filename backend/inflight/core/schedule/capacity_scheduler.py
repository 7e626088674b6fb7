"""Decides how KV blocks are allocated: how many a new sequence reserves, and which sequences are paused.

The two policies differ in the number of blocks that a sequence reserves at admission:

    GUARANTEED_NO_EVICT   blocks for its maximum length, so that growth never fails
    MAX_UTILIZATION       blocks for its context and one token; if blocks run out, the sequence started last
                          is paused

STATIC_BATCH reserves like GUARANTEED_NO_EVICT, and admits only when nothing runs. Requests of lower priority are
paused first. With either policy a beam search reserves blocks for its maximum length and is never paused, because
its beams would have to be recomputed one by one.

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
    """How running requests get their blocks for the next iteration.

    Attributes:
        paused: Requests to pause, in this order.
        num_blocks: Number of unreserved blocks that the other requests will take, and new requests must not.
        is_short: Whether there are too few blocks for all requests.
    """

    paused: tuple[LlmRequest, ...] = ()
    num_blocks: int = 0
    is_short: bool = False


class GuaranteedNoEvict:
    """Reserves at admission the blocks for a sequence's maximum length, and never pauses a sequence.

    Args:
        fills_batches_once: Whether requests are admitted only when none runs (static batching, V1).
    """

    def __init__(self, fills_batches_once: bool = False) -> None:
        self.fills_batches_once = fills_batches_once

    def blocks_to_reserve(self, request: LlmRequest, tokens_per_block: int) -> int:
        """Return the number of blocks to reserve at admission: for all tokens except the last generated one,
        which is never an input."""
        return request.request.max_kv_blocks(tokens_per_block)

    def decide_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Return no changes, as reservations cover all growth."""
        return Growth()


class MaxUtilization:
    """Reserves a sequence's context, and pauses the sequence started last when blocks run out; it resumes
    later."""

    fills_batches_once = False

    def blocks_to_reserve(self, request: LlmRequest, tokens_per_block: int) -> int:
        """Return the number of blocks to reserve at admission: for the known tokens, the draft and one more
        token, so that a resumed sequence makes progress.
        """
        if request.beams is not None:
            return request.request.max_kv_blocks(tokens_per_block)
        num_tokens = min(len(request.tokens) + max(1, request.draft_length), request.request.max_kv_tokens)
        return -(-num_tokens // tokens_per_block)

    def decide_growth(self, running: Sequence[LlmRequest], kv_cache: KvCacheManager) -> Growth:
        """Decide how the running sequences, oldest first, get blocks for their next token.

        Sequences get blocks by priority, then oldest first. If there is no free block for a sequence, the last
        started sequence of the lowest priority is paused.

        A request with tokens in flight cannot be paused. If there are too few blocks for this reason, the requests
        without a block are left out of the iteration.
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
        """Return the number of blocks needed beyond the reservation for the next token: at most one, at the
        start of a block."""
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
