"""The rows of those who run now: takes the KV blocks that each needs, and writes it into the batch.

Who runs, and with how many rows, is decided before; nothing here can fail but a growth outside of a reservation,
whose sequence is left out. What a sequence gets is counted as in flight. Called by the scheduler, on the loop
thread.
"""

from __future__ import annotations

from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.request.llm_request import LlmRequest
from inflight.core.schedule.batch_builder import BatchBuilder
from inflight.core.schedule.micro_batch_scheduler import Chunks, MicroBatch


def add_rows(selected: MicroBatch, kv_cache: KvCacheManager, batch: BatchBuilder) -> None:
    """Rows of everybody who was selected."""
    _add_context(selected.context, kv_cache, batch)
    _add_generation(selected.generation, selected.num_free_rows, kv_cache, batch)


def _add_context(chunks: Chunks, kv_cache: KvCacheManager, batch: BatchBuilder) -> None:
    for llm_request, num_tokens in chunks:
        end = llm_request.next_position + num_tokens
        batch.append_blocks(llm_request.slots[0], kv_cache.extend(llm_request.key, end))
        batch.add_chunk(llm_request, num_tokens)
        llm_request.num_scheduled_tokens += num_tokens


def _add_generation(
    sequences: list[LlmRequest], num_free_rows: int, kv_cache: KvCacheManager, batch: BatchBuilder
) -> None:
    """One that lacks a block is left out of this iteration."""
    size = kv_cache.tokens_per_block
    for llm_request in sequences:
        position = llm_request.num_computed_tokens + llm_request.num_scheduled_tokens
        if llm_request.beams is not None:
            growth = kv_cache.grow_beams(llm_request.key, position + 1)
            batch.add_beams(llm_request.slots, llm_request.beams, growth)
            llm_request.num_scheduled_tokens += 1
            continue
        if position % size == 0:
            if kv_cache.missing_blocks(llm_request.key, position + 1) > kv_cache.num_unreserved:
                continue
            batch.append_blocks(llm_request.slots[0], kv_cache.extend(llm_request.key, position + 1))
        if llm_request.lookup is not None and (draft := _look_up(llm_request, num_free_rows, kv_cache)):
            num_free_rows -= len(draft)
            end = position + 1 + len(draft)
            batch.append_blocks(llm_request.slots[0], kv_cache.extend(llm_request.key, end))
            batch.add_draft(llm_request, draft)
            llm_request.num_scheduled_tokens += 1 + len(draft)
            continue
        llm_request.num_scheduled_tokens += 1
        batch.generation_slots.append(llm_request.slots[0])


def _look_up(llm_request: LlmRequest, num_free_rows: int, kv_cache: KvCacheManager) -> tuple[int, ...]:
    """Draft tokens as far as there are rows, room in its own blocks and tokens to go."""
    request = llm_request.request
    room = kv_cache.num_certain_tokens(llm_request.key) - len(llm_request.tokens)
    left = request.max_new_tokens - llm_request.num_generated - 1
    most = min(request.prompt_lookup_num_tokens, num_free_rows, room, left)
    return llm_request.lookup.propose(most) if llm_request.lookup and most > 0 else ()
