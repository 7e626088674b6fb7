"""Decides which sequences run in this iteration, with how many tokens each, up to `max_num_tokens` rows.

Without chunked context, contexts go first, whole and first come, first served, then one token for every request in
generation. If a request in generation gets no row, generation goes first in the next iteration, so that a flow of
prompts cannot stall running streams. With chunked context, generation always goes first, and contexts fill the
remaining rows in chunks that end on a block boundary:

    FIRST_COME_FIRST_SERVED   the oldest context gets all remaining rows that it can use, then the next one
    EQUAL_PROGRESS            each context gets a block in turn, oldest first, so that short prompts do not wait
                              for the end of a long one; if rows are left for one block only, the oldest context
                              gets it

A chunk never ends inside a picture span (`picture_spans.py`), whose tokens attend to each other. In place of a
block boundary inside a span, there are the beginning and the end of the span.

A resumed context longer than max_num_tokens is always chunked, because its request was accepted and has to run. A
beam search in generation takes one row per beam. A request's own draft tokens follow the last token of its
context, in the same chunk.

With several micro-batches, one per pipeline stage, a sequence in generation waits while any of its rows is in
flight, as the first stage needs the token that the last stage samples. The sequences that do not wait are divided
evenly among the micro-batches, so that every stage has work; a beam search counts as one sequence, and the
sequence that has not run for the longest time goes first. A context chunk may follow another one in flight.

Used on the loop thread.
Reference: TensorRT-LLM `MicroBatchScheduler`, `enable_chunked_context`, `ContextChunkingPolicy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inflight.config import ChunkingPolicy, SchedulingConfig
from inflight.core.kv.picture_spans import span_at
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.schedule.batch import EngineLimits

Chunks = list[tuple[LlmRequest, int]]
"""Sequences and the number of context rows of each."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The sequences that run in an iteration.

    Attributes:
        context: Sequences in the context phase and the number of rows of each, draft tokens included.
        generation: Sequences in the generation phase.
        num_free_rows: Number of unused rows.
    """

    context: Chunks
    generation: list[LlmRequest]
    num_free_rows: int


class MicroBatchScheduler:
    """Selects the rows of each iteration from the running sequences."""

    def __init__(self, config: SchedulingConfig, limits: EngineLimits) -> None:
        self._max_num_tokens = config.max_num_tokens
        self._tokens_per_block = limits.tokens_per_block
        self._chunked = config.enable_chunked_context
        is_equal = config.context_chunking_policy is ChunkingPolicy.EQUAL_PROGRESS
        self._equal_progress = self._chunked and is_equal
        self._num_micro_batches = limits.num_micro_batches
        self._generation_was_left_out = False
        self._turn = 0

    def select(self, running: Iterable[LlmRequest], num_in_flight: int = 0) -> MicroBatch:
        """Select rows of the sequences in `running`, which are ordered oldest first, for the next micro-batch,
        while `num_in_flight` others are in flight."""
        in_context: list[LlmRequest] = []
        ready: list[LlmRequest] = []
        num_waiting = 0  # sequences that wait for their next token
        is_pipelined = self._num_micro_batches > 1
        for request in running:
            if request.state is RequestState.FINISHED:  # has ended, but still has batches in flight
                continue
            position = request.num_computed_tokens + request.num_scheduled_tokens
            if position < request.context_length:
                in_context.append(request)
            elif request.num_scheduled_tokens and (is_pipelined or request.needs_host):
                num_waiting += position < request.request.max_kv_tokens
            elif position < request.request.max_kv_tokens:
                ready.append(request)
        if is_pipelined:
            ready = self._share(ready, num_waiting, num_in_flight)
        budget = self._max_num_tokens
        if self._chunked or self._generation_was_left_out:
            generation, budget = self._select_generation(ready, budget)
            context, budget = self._select_context(in_context, budget)
        else:
            context, budget = self._select_context(in_context, budget)
            generation, budget = self._select_generation(ready, budget)
        self._generation_was_left_out = bool(context) and len(generation) < len(ready)
        if is_pipelined:
            self._note_turn(generation)
        return MicroBatch(context, generation, budget)

    def _share(self, ready: list[LlmRequest], num_waiting: int, num_in_flight: int) -> list[LlmRequest]:
        """Return this micro-batch's share of the sequences in generation."""
        num_micro_batches = self._num_micro_batches
        fair_share = -(-(len(ready) + num_waiting) // num_micro_batches)
        remaining_share = -(-len(ready) // max(1, num_micro_batches - num_in_flight))
        return sorted(ready, key=lambda request: request.last_turn)[: min(fair_share, remaining_share)]

    def _note_turn(self, generation: list[LlmRequest]) -> None:
        self._turn += 1
        for request in generation:
            request.last_turn = self._turn

    @staticmethod
    def _select_generation(ready: list[LlmRequest], budget: int) -> tuple[list[LlmRequest], int]:
        """Return as many of the sequences as `budget` rows allow, oldest first, and the number of remaining
        rows."""
        for index, request in enumerate(ready):
            rows = 1 if request.beams is None else request.num_slots
            if rows > budget:
                return ready[:index], budget
            budget -= rows
        return ready, budget

    def _select_context(self, waiting: Sequence[LlmRequest], budget: int) -> tuple[Chunks, int]:
        """Return the sequences that get context rows, and the number of remaining rows."""
        if self._equal_progress and len(waiting) > 1:
            return self._share_equally(waiting, budget)
        selected: Chunks = []
        for request in waiting:
            num_tokens = self._chunk(request, budget)
            if num_tokens == 0:
                break
            selected.append((request, num_tokens))
            budget -= num_tokens
        return selected, budget

    def _share_equally(self, waiting: Sequence[LlmRequest], budget: int) -> tuple[Chunks, int]:
        """Give each sequence one block in turn, oldest first.

        The end of a context, with its drafts, is indivisible.
        """
        rows = dict.fromkeys(range(len(waiting)), 0)
        unfinished = list(rows)
        while unfinished:
            still_open: list[int] = []
            for index in unfinished:
                grant, is_end = self._next_piece(waiting[index], rows[index])
                if grant <= budget:
                    rows[index] += grant
                    budget -= grant
                    if not is_end:
                        still_open.append(index)
            unfinished = still_open
        return [(waiting[index], count) for index, count in rows.items() if count], budget

    def _next_piece(self, request: LlmRequest, num_granted: int) -> tuple[int, bool]:
        """Return the number of rows up to the next place where a chunk may end, and whether the context ends
        there."""
        position = request.next_position + num_granted
        end = (position // self._tokens_per_block + 1) * self._tokens_per_block
        if span := span_at(request.rules.spans, end):
            end = span[0] if span[0] > position else span[1]
        if end < request.context_length:
            return end - position, False
        return request.context_length + request.draft_length - position, True

    def _chunk(self, request: LlmRequest, budget: int) -> int:
        start, size = request.next_position, self._tokens_per_block
        remaining = request.context_length - start + request.draft_length
        if remaining <= budget:
            return remaining
        if not self._chunked and request.context_length + request.draft_length <= self._max_num_tokens:
            return 0
        # A chunk that is not the last must end before the context's last token, because the drafts have to be
        # in that token's chunk.
        last = min(start + budget, request.context_length - 1)
        end = last // size * size
        for boundary in (end + size, end):
            span = span_at(request.rules.spans, boundary)
            if span and boundary > start and span[0] <= last:
                end = span[1] if span[1] <= last else span[0]
                break
        return max(0, end - start)
