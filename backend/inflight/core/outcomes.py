"""What follows from a batch that came back: tokens appended, blocks published, sequences ended, responses made.

What an answer means to its sequence alone, `progress.py` says; how sequences end, `endings.py`. Called by the
scheduler's `update`, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from inflight.core.endings import Endings, as_request_error
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.recover.recovery import Recovery
from inflight.core.report.observations import Observations
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.request.response import Response
from inflight.core.request.results import make_response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch, TokenDetails
from inflight.core.schedule.progress import (
    advance_beams,
    append_tokens,
    confirm_chunk,
    keep_context,
    no_token_left,
)
from inflight.core.schedule.running import Running


class Outcomes:
    """Takes batches row by row.

    Args:
        kv_cache: Where blocks that have become full are published.
        running: Who has which slot.
        admission: Where siblings wait for a prompt.
        recovery: Takes rows back that count for nothing.
        endings: The way out.
        observed: Is told.
    """

    def __init__(
        self,
        kv_cache: KvCacheManager,
        running: Running,
        admission: Admission,
        recovery: Recovery,
        endings: Endings,
        observed: Observations,
    ) -> None:
        self._kv_cache = kv_cache
        self._running = running
        self._admission = admission
        self._recovery = recovery
        self._endings = endings
        self._observed = observed
        self._now_ns = 0

    def take(self, batch: ScheduledBatch, output: ModelOutput, now_ns: int) -> list[Response]:
        """What there is to say to the requests of a batch.

        A row whose tokens cannot be taken ends its request with an error, and no other.

        Args:
            batch: What ran.
            output: What the device made of it.
            now_ns: When that was known.
        """
        self._now_ns = now_ns
        responses: list[Response] = []
        new_tokens = iter(output.token_ids)
        self._take_context(batch, output, new_tokens, responses)
        self._take_generation(batch, output, new_tokens, responses)
        self._take_beams(batch, output, responses)
        return responses

    # ---------------------------------------------------------------- row by row

    def _take_context(
        self,
        batch: ScheduledBatch,
        output: ModelOutput,
        new_tokens: Iterator[tuple[int, ...]],
        responses: list[Response],
    ) -> None:
        owners = self._running.slots.owners
        details = output.details
        for chunk in batch.context:
            llm_request = owners[chunk.slot]
            tokens = next(new_tokens) if chunk.is_last else ()
            if llm_request.is_void:
                self._recovery.take_back(llm_request, len(chunk.token_ids))
                continue
            try:
                confirm_chunk(llm_request, chunk, len(tokens))
                if chunk.wants_context:
                    keep_context(llm_request, chunk, output.context[chunk.slot])
                if chunk.is_last and not chunk.is_generation and llm_request.leads:
                    self._admission.queue_siblings(llm_request.group)
                self._refuse_nothing(llm_request, tokens, chunk.is_last)
                self._advance(llm_request, tokens, details.get(chunk.slot), responses, chunk.num_draft_tokens)
            except Exception as error:
                responses += self._fail(llm_request, error)

    def _take_generation(
        self,
        batch: ScheduledBatch,
        output: ModelOutput,
        new_tokens: Iterator[tuple[int, ...]],
        responses: list[Response],
    ) -> None:
        owners = self._running.slots.owners
        details = output.details
        for slot in batch.generation_slots:
            llm_request = owners[slot]
            tokens = next(new_tokens)
            if llm_request.beams is not None:
                continue
            if llm_request.is_void:
                self._recovery.take_back(llm_request, 1)
                continue
            llm_request.num_scheduled_tokens -= 1
            llm_request.num_computed_tokens += 1
            try:
                self._refuse_nothing(llm_request, tokens)
                self._advance(llm_request, tokens, details.get(slot) if details else None, responses)
            except Exception as error:
                responses += self._fail(llm_request, error)

    def _take_beams(self, batch: ScheduledBatch, output: ModelOutput, responses: list[Response]) -> None:
        for group, candidates in zip(batch.beam_groups, output.beams, strict=True):
            # A search that had ended before its context came back has left its slots by now.
            search = self._running.slots.owners.get(group.slots[0])
            if search is None:
                continue
            if search.is_void:
                if len(group.slots) > 1:  # else it was its context, which is taken back already
                    self._recovery.take_back(search, 1)
                continue
            try:
                self._advance_beams(search, len(group.slots), candidates, responses)
            except Exception as error:
                responses += self._fail(search, error)

    def _fail(self, llm_request: LlmRequest, error: Exception) -> list[Response]:
        return self._endings.fail(llm_request.group, as_request_error(error), self._now_ns)

    # ---------------------------------------------------------------- one sequence

    @staticmethod
    def _refuse_nothing(
        llm_request: LlmRequest, new_tokens: tuple[int, ...], is_sampled: bool = True
    ) -> None:
        """Raise for a row that was to get a token and got none."""
        is_ended = llm_request.state is RequestState.FINISHED
        if is_sampled and not new_tokens and llm_request.beams is None and not is_ended:
            raise no_token_left(llm_request)

    def _advance(
        self,
        llm_request: LlmRequest,
        new_tokens: tuple[int, ...],
        details: TokenDetails | None,
        responses: list[Response],
        num_drafts: int = 0,
    ) -> None:
        if llm_request.state is RequestState.FINISHED:  # its batch was in flight when it ended
            responses += self._endings.drain(llm_request, self._now_ns)
            return
        if new_tokens:
            self._observe_tokens(llm_request, len(new_tokens), num_drafts)
        reason = append_tokens(llm_request, new_tokens, details, self._now_ns)
        if llm_request.num_computed_tokens >= llm_request.next_block_end:
            self._publish(llm_request)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self._endings.finish(llm_request, reason, self._now_ns)
        elif new_tokens and llm_request.request.streaming:
            responses.append(make_response(llm_request, self._running.block_counts))

    def _advance_beams(
        self, llm_request: LlmRequest, num_rows: int, candidates: BeamCandidates, responses: list[Response]
    ) -> None:
        if num_rows > 1:  # else it was its context, which is confirmed
            llm_request.num_scheduled_tokens -= 1
            llm_request.num_computed_tokens += 1
        if llm_request.state is RequestState.FINISHED:
            responses += self._endings.drain(llm_request, self._now_ns)
            return
        self._observe_tokens(llm_request, num_rows)
        reason = advance_beams(llm_request, candidates, self._now_ns)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self._endings.finish(llm_request, reason, self._now_ns)
            return
        if llm_request.beams is not None:
            self._kv_cache.reorder_beams(llm_request.key, llm_request.beams.parents)
        # A search that began again after a failed iteration has said this much before.
        if llm_request.request.streaming and llm_request.num_generated > llm_request.num_streamed_tokens:
            responses.append(make_response(llm_request, self._running.block_counts))

    def _observe_tokens(self, llm_request: LlmRequest, count: int, num_drafts: int = 0) -> None:
        self._observed.gets_tokens(llm_request, count, num_drafts)
        if not llm_request.first_token_ns:
            self._observed.gave_first_token(llm_request, self._now_ns)

    def _publish(self, llm_request: LlmRequest) -> None:
        """Let others find the blocks that have become full."""
        num_tokens = min(llm_request.num_computed_tokens, len(llm_request.tokens))
        if llm_request.rules.scope is not None:
            self._kv_cache.publish(llm_request.key, llm_request.tokens, num_tokens)
        size = self._kv_cache.tokens_per_block
        llm_request.next_block_end = (num_tokens // size + 1) * size
