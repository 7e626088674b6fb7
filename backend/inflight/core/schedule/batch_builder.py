"""Builds a ScheduledBatch: the rows of the selected sequences and the KV blocks that they need.

The sequences and their numbers of rows are decided before. Only growth beyond a reservation can fail; then the
sequence is left out. Scheduled tokens are counted as in flight. Used by the scheduler, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.request.beam_search import BeamSearch
from inflight.core.request.drafters import Drafter
from inflight.core.request.head_drafts import HeadDrafts
from inflight.core.request.llm_request import LlmRequest
from inflight.core.schedule.adapter_pages import AdapterPages
from inflight.core.schedule.batch import (
    BeamGroup,
    BeamMove,
    ContextChunk,
    EngineLimits,
    ScheduledBatch,
    SlotStart,
    StateSave,
)
from inflight.core.schedule.micro_batch_scheduler import MicroBatch

_FEW_SEQUENCES = 4
"""Number of sequences up to which drafts are as long as requests allow, if guesses take no time and the sequence's
drafts have not cost more time than they saved."""


class BatchBuilder:
    """The rows and deltas of one iteration; `build` freezes them.

    Args:
        kv_cache: The source of the rows' blocks.
        adapter_pages: The pages of the rows' adapters.
        limits: The limits of the engine. Ids >= `vocab_size` stand for rows of prompt tables and are never
            generated.
    """

    def __init__(self, kv_cache: KvCacheManager, adapter_pages: AdapterPages, limits: EngineLimits) -> None:
        self._kv_cache = kv_cache
        self._adapter_pages = adapter_pages
        self._limits = limits
        self._starts: list[SlotStart] = []
        self._new_blocks: list[tuple[int, tuple[int, ...]]] = []
        self._context: list[ContextChunk] = []
        self._generation_slots: list[int] = []
        self._block_copies: list[tuple[int, int]] = []
        self._moves: list[BeamMove] = []
        self._replaced_blocks: list[tuple[int, int, int]] = []
        self._beam_groups: list[BeamGroup] = []
        self._state_saves: list[StateSave] = []
        self._head_slots: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether the batch has no rows."""
        return not self._context and not self._generation_slots

    @property
    def has_starts(self) -> bool:
        """Whether any sequence was started."""
        return bool(self._starts)

    def add_start(self, llm_request: LlmRequest) -> None:
        """Start a sequence on the device. It must have slots, a block table and, if it uses an adapter, its
        pages."""
        request, slot = llm_request.request, llm_request.slots[0]
        token_ids = tuple(llm_request.tokens) if request.starts_with_tokens else ()
        adapter = self._adapter_pages.first_page(llm_request.key)
        snapshot = self._kv_cache.snapshot(llm_request.key)
        self._starts.append(
            SlotStart(slot, request, llm_request.sequence_index, token_ids, adapter, snapshot)
        )
        copy = self._kv_cache.block_copy(llm_request.key)
        if copy is not None and copy[0] != copy[1]:
            self._block_copies.append(copy)
        self._append_blocks(slot, self._kv_cache.block_table(llm_request.key))

    def add_rows(self, selected: MicroBatch) -> None:
        """Add the rows of every selected sequence."""
        for llm_request, num_rows in selected.context:
            self._extend(llm_request, llm_request.next_position + num_rows)
            self._add_chunk(llm_request, num_rows)
            llm_request.num_scheduled_tokens += num_rows
        self._add_generation(selected.generation, selected.num_free_rows)

    def _append_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        if block_ids:
            self._new_blocks.append((slot, block_ids))

    def _extend(self, llm_request: LlmRequest, num_tokens: int, in_generation: bool = False) -> None:
        """Give a sequence the blocks for `num_tokens` tokens."""
        block_ids = self._kv_cache.extend(llm_request.key, num_tokens, in_generation)
        self._append_blocks(llm_request.slots[0], block_ids)

    def _add_chunk(self, llm_request: LlmRequest, num_rows: int) -> None:
        """Add the next rows of a context; after its last row, the request's own draft if there is one.

        A draft head reads them, also for later sequences that share their blocks.
        """
        if self._limits.has_useful_head:
            self._head_slots.append(llm_request.slots[0])
        start, draft = llm_request.next_position, llm_request.draft_length
        end = start + num_rows
        is_last = end == llm_request.context_length + draft
        token_ids = tuple(llm_request.tokens[start:end])
        if is_last and llm_request.request.draft and draft:
            token_ids += llm_request.request.draft.token_ids
        self._context.append(
            ContextChunk(
                llm_request.slots[0],
                start,
                token_ids,
                is_last,
                num_draft_tokens=draft if is_last else 0,
                wants_context=llm_request.gives_context,
            )
        )
        if self._kv_cache.states is not None:
            certain = min(end, llm_request.context_length)
            self._state_saves += [
                StateSave(llm_request.slots[0], num_tokens, snapshot)
                for num_tokens, snapshot in self._kv_cache.states.save(llm_request.key, start, certain)
            ]
        if is_last and llm_request.beams is not None:
            self._add_beam_group(llm_request.slots, llm_request.beams)

    def _add_generation(self, sequences: list[LlmRequest], num_free_rows: int) -> None:
        """Add rows of sequences in generation. A sequence that lacks a block is left out of this iteration."""
        kv_cache, size = self._kv_cache, self._kv_cache.tokens_per_block
        generation_slots = self._generation_slots
        for llm_request in sequences:
            position = llm_request.num_computed_tokens + llm_request.num_scheduled_tokens
            if llm_request.beams is not None:
                self._add_beams(llm_request, llm_request.beams, position + 1)
                llm_request.num_scheduled_tokens += 1
                continue
            if position % size == 0:
                if kv_cache.missing_blocks(llm_request.key, position + 1) > kv_cache.num_unreserved:
                    continue
                self._extend(llm_request, position + 1, in_generation=True)
            drafter = llm_request.drafter
            if isinstance(drafter, HeadDrafts) and not drafter.length.is_over:
                self._head_slots.append(llm_request.slots[0])
            if drafter is not None and (
                draft := self._draft(llm_request, drafter, num_free_rows, len(sequences))
            ):
                num_free_rows -= len(draft)
                self._extend(llm_request, position + 1 + len(draft), in_generation=True)
                self._add_draft(llm_request, draft)
                llm_request.num_scheduled_tokens += 1 + len(draft)
                continue
            llm_request.num_scheduled_tokens += 1
            generation_slots.append(llm_request.slots[0])
            if (position + 1) % size == 0:
                self._save_state(llm_request, position + 1)

    def _save_state(self, llm_request: LlmRequest, num_tokens: int) -> None:
        """Save the recurrent state, if the model has one, at a block boundary in generation."""
        states = self._kv_cache.states
        if states is None or llm_request.rules.scope is None:
            return
        snapshot = states.save_generated(llm_request.key, num_tokens)
        if snapshot is not None:
            self._state_saves.append(StateSave(llm_request.slots[0], num_tokens, snapshot))

    def _draft(
        self, llm_request: LlmRequest, drafter: Drafter, num_free_rows: int, num_sequences: int
    ) -> tuple[int, ...]:
        """Return a sequence's draft tokens, as many as free rows, its own blocks and the length limit allow.

        With few sequences a forward pass mostly reads weights, and draft rows cost little. With more, if a draft
        head takes time for each guess, or once useless drafts have taken too much time, only as many tokens are
        drafted as earlier drafts of the sequence suggest (`DraftLength`). A draft head that has taken too much
        time drafts nothing.

        The draft ends before the first token that stands for a row of a prompt table.
        """
        limits, needed_share = self._limits, self._limits.needed_share(num_sequences)
        has_head = limits.guess_cost > 0
        if has_head and drafter.length.is_over:
            return ()
        request = llm_request.request
        room = self._kv_cache.num_certain_tokens(llm_request.key) - len(llm_request.tokens)
        left = request.max_new_tokens - llm_request.num_generated - 1
        most = min(drafter.length.most, num_free_rows, room, left)
        if self._kv_cache.states is not None:
            # A draft ends before the last token of a block, as the state is saved after a generation row with
            # that token.
            size = self._kv_cache.tokens_per_block
            most = min(most, size - 2 - llm_request.num_computed_tokens % size)
        if num_sequences > _FEW_SEQUENCES or has_head or drafter.length.is_over:
            most = min(most, drafter.length.tokens_if(needed_share))
        draft = drafter.propose(most) if most > 0 else ()
        if has_head or not limits.entry_cost:  # a benchmark may ignore what a head costs
            drafter.length.spend(len(draft) * needed_share + has_head * (1 + len(draft)) * limits.entry_cost)
        if request.prompt_table is None:
            return draft
        return tuple(takewhile(lambda token_id: token_id < limits.vocab_size, draft))

    def _add_draft(self, llm_request: LlmRequest, draft: tuple[int, ...]) -> None:
        """Add a sequence in generation with draft tokens after its last token."""
        start = llm_request.num_computed_tokens
        token_ids = (llm_request.tokens[start], *draft)
        self._context.append(
            ContextChunk(llm_request.slots[0], start, token_ids, True, len(draft), is_generation=True)
        )

    def _add_beams(self, llm_request: LlmRequest, search: BeamSearch, num_tokens: int) -> None:
        """Add a row for each running beam, which continues its parent with a new token."""
        slots, growth = llm_request.slots, self._kv_cache.grow_beams(llm_request.key, num_tokens)
        self._block_copies += growth.copies
        self._moves += [
            BeamMove(slot, slots[parent], token_id)
            for slot, parent, token_id in zip(slots, search.parents, search.token_ids, strict=True)
        ]
        self._replaced_blocks += [(slots[beam], index, block_id) for beam, index, block_id in growth.replaced]
        self._new_blocks += [(slots[beam], (block_id,)) for beam, block_id in growth.appended]
        self._generation_slots += slots
        self._add_beam_group(slots, search)

    def _add_beam_group(self, slots: Sequence[int], search: BeamSearch) -> None:
        rows = tuple(slots[: search.num_rows])
        self._beam_groups.append(BeamGroup(rows, search.scores, search.num_candidates))

    def build(
        self, iteration: int, micro_batch_id: int, released_slots: tuple[int, ...], samples_on_device: bool
    ) -> ScheduledBatch:
        """Return the batch, as number `iteration`."""
        return ScheduledBatch(
            iteration=iteration,
            micro_batch_id=micro_batch_id,
            released_slots=released_slots,
            starts=tuple(self._starts),
            adapter_loads=self._adapter_pages.collect_loads(),
            block_copies=tuple(self._block_copies),
            moves=tuple(self._moves),
            replaced_blocks=tuple(self._replaced_blocks),
            new_blocks=tuple(self._new_blocks),
            context=tuple(self._context),
            generation_slots=tuple(self._generation_slots),
            beam_groups=tuple(self._beam_groups),
            state_saves=tuple(self._state_saves),
            head_slots=tuple(self._head_slots),
            samples_on_device=samples_on_device,
        )
