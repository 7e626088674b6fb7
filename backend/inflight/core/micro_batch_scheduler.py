"""Who runs in this iteration, and with how many tokens: fills `max_num_tokens` rows of one forward pass.

Without chunked context, contexts go first, whole and first come, first served, then one token for every request
in generation. With it, generation goes first, so that no long prompt delays a running stream, and contexts fill
what is left in chunks that end on a block boundary. A resumed context longer than max_num_tokens is always
chunked: its request was accepted, so it has to run. A beam search in generation takes a row for each beam. Draft
tokens that a request brought stand behind its context, in the same chunk as its last token.

Asks and returns; changes nothing. Reference: TensorRT-LLM `MicroBatchScheduler`, `enable_chunked_context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.core.llm_request import LlmRequest, RequestState


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The selection.

    Attributes:
        context: Sequences and how many rows of context each gets, draft tokens included.
        generation: Sequences that generate.
        num_free_rows: Rows that nobody was given.
    """

    context: list[tuple[LlmRequest, int]]
    generation: list[LlmRequest]
    num_free_rows: int


class MicroBatchScheduler:
    """Fills one iteration from the running requests."""

    def __init__(self, max_num_tokens: int, tokens_per_block: int, enable_chunked_context: bool) -> None:
        self._max_num_tokens = max_num_tokens
        self._tokens_per_block = tokens_per_block
        self._chunked = enable_chunked_context

    def select(self, running: Sequence[LlmRequest]) -> MicroBatch:
        """Choose from `running`, oldest first."""
        in_context: list[LlmRequest] = []
        generating: list[LlmRequest] = []
        for request in running:
            if request.state is RequestState.FINISHED:  # it only waits for its batches in flight
                continue
            position = request.num_computed_tokens + request.num_scheduled_tokens
            if position < request.context_length:
                in_context.append(request)
            elif request.needs_host and request.num_scheduled_tokens:
                continue
            elif position < request.request.max_kv_tokens:
                generating.append(request)
        budget = self._max_num_tokens
        if self._chunked:
            generating, budget = self._select_generation(generating, budget)
            context, budget = self._select_context(in_context, budget)
        else:
            context, budget = self._select_context(in_context, budget)
            generating, budget = self._select_generation(generating, budget)
        return MicroBatch(context, generating, budget)

    @staticmethod
    def _select_generation(waiting: list[LlmRequest], budget: int) -> tuple[list[LlmRequest], int]:
        """Oldest first, as many as there are rows for; and the rows that are left."""
        for index, request in enumerate(waiting):
            rows = 1 if request.beams is None else request.num_slots
            if rows > budget:
                return waiting[:index], budget
            budget -= rows
        return waiting, budget

    def _select_context(
        self, waiting: Sequence[LlmRequest], budget: int
    ) -> tuple[list[tuple[LlmRequest, int]], int]:
        """Oldest first, until one gets no rows; and the rows that are left."""
        selected: list[tuple[LlmRequest, int]] = []
        for request in waiting:
            num_tokens = self._chunk(request, budget)
            if num_tokens == 0:
                break
            selected.append((request, num_tokens))
            budget -= num_tokens
        return selected, budget

    def _chunk(self, request: LlmRequest, budget: int) -> int:
        start, size = request.next_position, self._tokens_per_block
        remaining = request.context_length - start + request.draft_length
        if remaining <= budget:
            return remaining
        if not self._chunked and request.context_length + request.draft_length <= self._max_num_tokens:
            return 0
        # A chunk that is not the last ends before the context does: the drafts need a last token to stand behind.
        end = min(start + budget, request.context_length - 1) // size * size
        return max(0, end - start)
