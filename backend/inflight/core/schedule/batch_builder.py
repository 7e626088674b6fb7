"""A ScheduledBatch while it is being put together. The scheduler fills it; `build` freezes it."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.core.kv.kv_cache_manager import BeamGrowth, KvCacheManager
from inflight.core.request.beam_search import BeamSearch
from inflight.core.request.llm_request import LlmRequest
from inflight.core.schedule.batch import BeamGroup, BeamMove, ContextChunk, ScheduledBatch, SlotStart
from inflight.core.schedule.micro_batch_scheduler import Chunks, MicroBatch


class BatchBuilder:
    """Rows and deltas of one iteration."""

    def __init__(self) -> None:
        self.starts: list[SlotStart] = []
        self.new_blocks: list[tuple[int, tuple[int, ...]]] = []
        self.context: list[ContextChunk] = []
        self.generation_slots: list[int] = []
        self._block_copies: list[tuple[int, int]] = []
        self._moves: list[BeamMove] = []
        self._replaced_blocks: list[tuple[int, int, int]] = []
        self._beam_groups: list[BeamGroup] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs."""
        return not self.context and not self.generation_slots

    def append_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        """Let a slot's block table grow, if there is anything to append."""
        if block_ids:
            self.new_blocks.append((slot, block_ids))

    def copy_block(self, copy: tuple[int, int] | None) -> None:
        """Let a block have another one's content, if that is not the same: (source, target)."""
        if copy is not None and copy[0] != copy[1]:
            self._block_copies.append(copy)

    def add_chunk(self, llm_request: LlmRequest, num_rows: int) -> None:
        """The next rows of a context; behind the last of them the request's own draft, if there is one."""
        start, draft = llm_request.next_position, llm_request.draft_length
        end = start + num_rows
        is_last = end == llm_request.context_length + draft
        token_ids = tuple(llm_request.tokens[start:end])
        if is_last and llm_request.request.draft and draft:
            token_ids += llm_request.request.draft.token_ids
        self.context.append(
            ContextChunk(
                llm_request.slots[0],
                start,
                token_ids,
                is_last,
                num_draft_tokens=draft if is_last else 0,
                wants_context=llm_request.gives_context,
            )
        )
        if is_last and llm_request.beams is not None:
            self._want_candidates(llm_request.slots, llm_request.beams)

    def add_draft(self, llm_request: LlmRequest, draft: tuple[int, ...]) -> None:
        """A sequence in generation with a guess at what follows its last token."""
        start = llm_request.num_computed_tokens
        token_ids = (llm_request.tokens[start], *draft)
        self.context.append(
            ContextChunk(llm_request.slots[0], start, token_ids, True, len(draft), is_generation=True)
        )

    def add_beams(self, slots: Sequence[int], search: BeamSearch, growth: BeamGrowth) -> None:
        """A row for each running beam, which goes on from its parent with its new token."""
        self._block_copies += growth.copies
        self._moves += [
            BeamMove(slot, slots[parent], token_id)
            for slot, parent, token_id in zip(slots, search.parents, search.token_ids, strict=True)
        ]
        self._replaced_blocks += [(slots[beam], index, block_id) for beam, index, block_id in growth.replaced]
        self.new_blocks += [(slots[beam], (block_id,)) for beam, block_id in growth.appended]
        self.generation_slots += slots
        self._want_candidates(slots, search)

    def _want_candidates(self, slots: Sequence[int], search: BeamSearch) -> None:
        """The sampled rows of these slots are a beam search's."""
        rows = tuple(slots[: search.num_rows])
        self._beam_groups.append(BeamGroup(rows, search.scores, search.num_candidates))

    def build(
        self, iteration: int, micro_batch_id: int, released_slots: Sequence[int], samples_on_device: bool
    ) -> ScheduledBatch:
        """The finished batch."""
        return ScheduledBatch(
            iteration=iteration,
            micro_batch_id=micro_batch_id,
            released_slots=tuple(released_slots),
            starts=tuple(self.starts),
            block_copies=tuple(self._block_copies),
            moves=tuple(self._moves),
            replaced_blocks=tuple(self._replaced_blocks),
            new_blocks=tuple(self.new_blocks),
            context=tuple(self.context),
            generation_slots=tuple(self.generation_slots),
            beam_groups=tuple(self._beam_groups),
            samples_on_device=samples_on_device,
        )


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
