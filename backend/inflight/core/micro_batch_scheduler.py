"""Who runs in this iteration, and with how many tokens: fills `max_num_tokens` rows of one forward pass.

Without chunked context, contexts go first, whole and first come, first served, then one token for every request
in generation. With it, generation goes first, so that no long prompt delays a running stream, and contexts fill
what is left in chunks that end on a block boundary. A resumed context longer than max_num_tokens is always
chunked: its request was accepted, so it has to run.

Asks and returns; changes nothing. Reference: TensorRT-LLM `MicroBatchScheduler`, `enable_chunked_context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.core.llm_request import LlmRequest, RequestState


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The selection: (request, number of context tokens) pairs, and requests that generate one token."""

    context: list[tuple[LlmRequest, int]]
    generation: list[LlmRequest]


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
            elif position < request.request.max_kv_tokens:
                generating.append(request)
        budget = self._max_num_tokens
        if self._chunked:
            generating = generating[:budget]
            context = self._select_context(in_context, budget - len(generating))
        else:
            context = self._select_context(in_context, budget)
            generating = generating[: budget - sum(num_tokens for _, num_tokens in context)]
        return MicroBatch(context, generating)

    def _select_context(self, waiting: Sequence[LlmRequest], budget: int) -> list[tuple[LlmRequest, int]]:
        selected: list[tuple[LlmRequest, int]] = []
        for request in waiting:
            num_tokens = self._chunk(request, budget)
            if num_tokens == 0:
                break
            selected.append((request, num_tokens))
            budget -= num_tokens
        return selected

    def _chunk(self, request: LlmRequest, budget: int) -> int:
        start = request.next_position
        remaining = request.context_length - start
        if remaining <= budget:
            return remaining
        if not self._chunked and request.context_length <= self._max_num_tokens:
            return 0
        end = (start + budget) // self._tokens_per_block * self._tokens_per_block
        return max(0, end - start)
