"""Oracle of one scheduler's choice of rows for each iteration, by the rules of `micro_batch_scheduler.py`.

It checks that no sequence is left out while there are rows for it, and that sequences get rows in order.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import ceil

from inflight.config import ChunkingPolicy, SchedulingConfig
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.schedule.batch import EngineLimits
from inflight.core.schedule.micro_batch_scheduler import MicroBatch
from inflight.core.scheduler import Scheduler

from .stages_oracle import waits_for_host


class RowsOracle:
    """Oracle wrapped around a scheduler's method that selects rows.

    Attributes:
        num_divided: Iterations in which several contexts shared too few rows.
        num_shared: Iterations that left sequences in generation for other pipeline stages.
    """

    def __init__(self, scheduler: Scheduler, config: SchedulingConfig, limits: EngineLimits) -> None:
        self.num_divided = 0
        self.num_shared = 0
        self._config = config
        self._size = limits.tokens_per_block
        self._has_spans, self._vocab_size = limits.has_spans, limits.vocab_size
        self._num_stages = limits.num_micro_batches
        self._num_selections = 0
        # By sequence key: the number of the last selection that chose it for generation.
        self._last_chosen: dict[int, int] = {}
        self._equally = config.context_chunking_policy is ChunkingPolicy.EQUAL_PROGRESS
        self._generation_was_left_out = False
        self._select = scheduler._micro_batch.select
        scheduler._micro_batch.select = self._watched_select

    def _watched_select(self, running: Iterable[LlmRequest], num_in_flight: int = 0) -> MicroBatch:
        running = list(running)
        selected = self._select(running, num_in_flight)
        live = [r for r in running if r.state is not RequestState.FINISHED]
        contexts = [r for r in live if r.next_position < r.context_length]
        ready = self._take_turns([r for r in live if r not in contexts], num_in_flight)
        rows_of_generation = sum(map(_rows, selected.generation))
        granted = {r.key: count for r, count in selected.context}
        rows_of_context = sum(granted.values())

        assert rows_of_generation + rows_of_context + selected.num_free_rows == self._config.max_num_tokens
        assert selected.num_free_rows >= 0
        assert selected.generation == ready[: len(selected.generation)], "the oldest go first"
        chunked = self._config.enable_chunked_context
        generation_first = chunked or self._generation_was_left_out
        if len(selected.generation) < len(ready):
            behind = 0 if generation_first else rows_of_context
            left = self._config.max_num_tokens - rows_of_generation - behind
            assert _rows(ready[len(selected.generation)]) > left, (
                "a sequence in generation was left out though there were rows for it"
            )
        self._generation_was_left_out = bool(granted) and len(selected.generation) < len(ready)

        budget = self._config.max_num_tokens - (rows_of_generation if generation_first else 0)
        expected = self._one_after_another(contexts, budget)
        if chunked and self._equally:
            in_turn = self._in_turn(contexts, budget)
            self.num_divided += expected != in_turn
            expected = in_turn
        assert granted == expected, "contexts got other rows than expected"
        self._num_selections += 1
        self._last_chosen |= {r.key: self._num_selections for r in selected.generation}
        return selected

    def _take_turns(self, generating: list[LlmRequest], num_in_flight: int) -> list[LlmRequest]:
        """Return the sequences that generate if there are rows for them.

        In a pipeline these are the least recently chosen ones, as many as are one stage's share. A sequence is
        left out if the host must see its token in flight first.
        """
        ready = [r for r in generating if r.next_position < r.request.max_kv_tokens]
        if self._num_stages == 1:
            return [r for r in ready if not (r.num_scheduled_tokens and waits_for_host(r.request))]
        ready = [r for r in ready if not r.num_scheduled_tokens]
        num_going_on = sum(r.next_position < r.request.max_kv_tokens for r in generating)
        num_free = max(1, self._num_stages - num_in_flight)
        share = min(ceil(num_going_on / self._num_stages), ceil(len(ready) / num_free))
        self.num_shared += share < len(ready)
        ready.sort(key=lambda r: self._last_chosen.get(r.key, 0))
        return ready[:share]

    def _pieces(self, llm_request: LlmRequest) -> list[int]:
        """Return the numbers of rows between the places where a chunk may end; drafts follow the last token.

        In place of a boundary inside a picture span there are the beginning and the end of the span.
        """
        start, end = llm_request.next_position, llm_request.context_length
        boundaries = {at for at in range(start + 1, end + 1) if at % self._size == 0}
        for span in self._spans(llm_request):
            if inside := boundaries & set(span[1:]):
                boundaries = boundaries - inside | {span[0], span[-1] + 1}
        between = sorted(at for at in boundaries if start < at < end)
        places = [start, *between, end + llm_request.draft_length]
        whole = places[-1] - start
        if not self._config.enable_chunked_context and self._fits_whole(llm_request):
            return [whole]
        return [after - before for before, after in pairwise(places)]

    def _spans(self, llm_request: LlmRequest) -> list[list[int]]:
        """Return the positions of each picture span."""
        spans: list[list[int]] = []
        for position, token_id in enumerate(llm_request.request.input_token_ids if self._has_spans else ()):
            if token_id >= self._vocab_size:
                if spans and spans[-1][-1] == position - 1:
                    spans[-1].append(position)
                else:
                    spans.append([position])
        return spans

    def _fits_whole(self, llm_request: LlmRequest) -> bool:
        return llm_request.context_length + llm_request.draft_length <= self._config.max_num_tokens

    def _one_after_another(self, contexts: list[LlmRequest], budget: int) -> dict[int, int]:
        granted: dict[int, int] = {}
        for llm_request in contexts:
            count = 0
            for piece in self._pieces(llm_request):
                if count + piece > budget:
                    break
                count += piece
            if not count:
                break
            granted[llm_request.key] = count
            budget -= count
        return granted

    def _in_turn(self, contexts: list[LlmRequest], budget: int) -> dict[int, int]:
        granted: dict[int, int] = {}
        open_pieces = {r.key: self._pieces(r) for r in contexts}
        while open_pieces:
            for key, pieces in list(open_pieces.items()):
                if pieces[0] > budget:
                    del open_pieces[key]
                    continue
                piece = pieces.pop(0)
                granted[key] = granted.get(key, 0) + piece
                budget -= piece
                if not pieces:
                    del open_pieces[key]
        return granted


def _rows(llm_request: LlmRequest) -> int:
    return llm_request.request.sampling.beam_width
