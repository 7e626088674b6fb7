"""Applies a finished batch: appends tokens, publishes blocks, makes responses, ends sequences.

The functions at the end of this file change a single sequence; `endings.py` ends sequences. Called by the
scheduler's `update`, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inflight.core.endings import Endings, as_request_error
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.recover.recovery import Recovery
from inflight.core.report.metrics import Observations
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.guide import GUIDE_END
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.request.response import Response
from inflight.core.request.results import make_response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.batch import (
    ContextChunk,
    ContextDetails,
    ModelOutput,
    ScheduledBatch,
    TokenDetails,
)
from inflight.core.schedule.running import Running
from inflight.errors import InflightError, InvalidArgument, joined


@dataclass(slots=True)
class Outcomes:
    """Applies the device's output for a batch, row by row.

    Attributes:
        kv_cache: Publishes blocks that have become full.
        running: The sequences that have slots.
        admission: Queues sequences that waited for a prompt.
        recovery: Counts the rows whose results arrived after a failed iteration.
        endings: Ends sequences.
        observed: Counts tokens.
        now_ns: When the output that is being applied arrived, in monotonic nanoseconds.
        iteration: Number of the iteration that computed this output.
    """

    kv_cache: KvCacheManager
    running: Running
    admission: Admission
    recovery: Recovery
    endings: Endings
    observed: Observations
    now_ns: int = 0
    iteration: int = 0

    def apply(self, batch: ScheduledBatch, output: ModelOutput, now_ns: int) -> list[Response]:
        """Apply the device's output for a batch and return the resulting responses.

        A row whose processing raises, or that the device reports as failed, ends only its own request, with an
        error.

        Args:
            batch: The batch that ran.
            output: The device's output for the batch.
            now_ns: When the output arrived, in monotonic nanoseconds.
        """
        self.now_ns = now_ns
        self.iteration = batch.iteration
        responses: list[Response] = []
        new_tokens = iter(output.token_ids)
        self._apply_context(batch, output, new_tokens, responses)
        self._apply_generation(batch, output, new_tokens, responses)
        self._apply_beams(batch, output, responses)
        return responses

    # ---------------------------------------------------------------- row by row

    def _apply_context(
        self,
        batch: ScheduledBatch,
        output: ModelOutput,
        new_tokens: Iterator[tuple[int, ...]],
        responses: list[Response],
    ) -> None:
        owners = self.running.slots.owners
        details = output.details
        for chunk in batch.context:
            llm_request = owners[chunk.slot]
            tokens = next(new_tokens) if chunk.is_last else ()
            if llm_request.is_void:
                self.recovery.rows_came_back(llm_request, len(chunk.token_ids))
                continue
            try:
                confirm_chunk(llm_request, chunk, len(tokens))
                # Not for an ended sequence: an earlier chunk may have failed, so that context outputs are
                # incomplete.
                if chunk.wants_context and llm_request.state is not RequestState.FINISHED:
                    keep_context(llm_request, chunk, output.context[chunk.slot])
                if chunk.is_last and not chunk.is_generation and llm_request.leads:
                    self.admission.queue_siblings(llm_request.group)
                self._check_failure(llm_request, output.failures.get(chunk.slot))
                self._check_tokens(llm_request, tokens, chunk.is_last)
                self._advance(llm_request, tokens, details.get(chunk.slot), responses, chunk.num_draft_tokens)
            except Exception as error:  # a faulty row must not affect other requests
                responses += self._fail(llm_request, error)

    def _apply_generation(
        self,
        batch: ScheduledBatch,
        output: ModelOutput,
        new_tokens: Iterator[tuple[int, ...]],
        responses: list[Response],
    ) -> None:
        owners = self.running.slots.owners
        details, failures = output.details, output.failures
        for slot in batch.generation_slots:
            llm_request = owners[slot]
            tokens = next(new_tokens)
            if llm_request.beams is not None:
                continue
            if llm_request.is_void:
                self.recovery.rows_came_back(llm_request, 1)
                continue
            llm_request.num_scheduled_tokens -= 1
            llm_request.num_computed_tokens += 1
            try:
                if failures:
                    self._check_failure(llm_request, failures.get(slot))
                self._check_tokens(llm_request, tokens)
                self._advance(llm_request, tokens, details.get(slot) if details else None, responses)
            except Exception as error:  # as in `_apply_context`
                responses += self._fail(llm_request, error)

    def _apply_beams(self, batch: ScheduledBatch, output: ModelOutput, responses: list[Response]) -> None:
        for group, candidates in zip(batch.beam_groups, output.beams, strict=True):
            # A search that ended before its context's batch was back no longer has slots.
            search = self.running.slots.owners.get(group.slots[0])
            if search is None:
                continue
            if search.is_void:
                # Otherwise the row was the search's context, which is counted already.
                if len(group.slots) > 1:
                    self.recovery.rows_came_back(search, 1)
                continue
            failure = next((output.failures[slot] for slot in group.slots if slot in output.failures), None)
            try:
                self._advance_beams(search, len(group.slots), candidates, failure, responses)
            except Exception as error:  # as in `_apply_context`
                responses += self._fail(search, error)

    def _fail(self, llm_request: LlmRequest, error: Exception) -> list[Response]:
        return self.endings.fail(llm_request.group, as_request_error(error), self.now_ns)

    # ---------------------------------------------------------------- one sequence

    @staticmethod
    def _check_failure(llm_request: LlmRequest, failure: InflightError | None) -> None:
        """Raise the error of a failed row, unless its sequence had already ended."""
        if failure is not None and llm_request.state is not RequestState.FINISHED:
            raise failure

    @staticmethod
    def _check_tokens(llm_request: LlmRequest, new_tokens: tuple[int, ...], is_sampled: bool = True) -> None:
        """Raise InvalidArgument for a sampled row that got no token."""
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
        if llm_request.state is RequestState.FINISHED:  # it ended while this batch was in flight
            responses += self.endings.drain(llm_request, self.now_ns)
            return
        if new_tokens:
            self._observe_tokens(llm_request, len(new_tokens), num_drafts)
            if num_drafts and llm_request.drafter is not None:
                llm_request.drafter.length.verified(num_drafts, len(new_tokens) - 1)
        reason = append_tokens(llm_request, new_tokens, details, self.now_ns)
        draft = llm_request.request.draft
        if num_drafts and draft is not None and draft.ends_sequence and reason is FinishReason.NOT_FINISHED:
            reason = FinishReason.LENGTH
        if llm_request.num_computed_tokens >= llm_request.next_block_end:
            self._publish(llm_request)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self.endings.finish(llm_request, reason, self.now_ns)
        elif new_tokens and llm_request.request.streaming:
            responses.append(make_response(llm_request, self.running.block_counts))

    def _advance_beams(
        self,
        llm_request: LlmRequest,
        num_rows: int,
        candidates: BeamCandidates,
        failure: InflightError | None,
        responses: list[Response],
    ) -> None:
        if num_rows > 1:  # otherwise the row was the search's context, which is confirmed already
            llm_request.num_scheduled_tokens -= 1
            llm_request.num_computed_tokens += 1
        if llm_request.state is RequestState.FINISHED:
            responses += self.endings.drain(llm_request, self.now_ns)
            return
        self._check_failure(llm_request, failure)
        self._observe_tokens(llm_request, num_rows)
        reason = advance_beams(llm_request, candidates, self.now_ns)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self.endings.finish(llm_request, reason, self.now_ns)
            return
        if llm_request.beams is not None:
            self.kv_cache.reorder_beams(llm_request.key, llm_request.beams.parents)
        # A search that was restarted after a failed iteration has already streamed its first tokens.
        if llm_request.request.streaming and llm_request.num_generated > llm_request.num_streamed_tokens:
            responses.append(make_response(llm_request, self.running.block_counts))

    def _observe_tokens(self, llm_request: LlmRequest, count: int, num_drafts: int = 0) -> None:
        self.observed.gets_tokens(llm_request, count, num_drafts)
        llm_request.last_iteration = self.iteration
        if not llm_request.first_token_ns:
            llm_request.first_iteration = self.iteration
            self.observed.gave_first_token(llm_request, self.now_ns)

    def _publish(self, llm_request: LlmRequest) -> None:
        """Let other sequences find the blocks that have become full."""
        num_tokens = min(llm_request.num_computed_tokens, len(llm_request.tokens))
        if llm_request.rules.scope is not None:
            self.kv_cache.publish(llm_request.key, llm_request.tokens, num_tokens)
        size = self.kv_cache.tokens_per_block
        llm_request.next_block_end = (num_tokens // size + 1) * size


def confirm_chunk(llm_request: LlmRequest, chunk: ContextChunk, num_new_tokens: int) -> None:
    """Count a chunk's tokens as computed, without rejected drafts.

    `num_new_tokens` is the number of accepted drafts plus 1.
    """
    num_tokens, num_drafts = len(chunk.token_ids), chunk.num_draft_tokens
    llm_request.num_scheduled_tokens -= num_tokens
    num_accepted = 0
    if num_drafts:
        num_accepted = max(0, num_new_tokens - 1)
        llm_request.has_draft = False
        llm_request.num_draft_tokens += num_drafts
    llm_request.num_computed_tokens += num_tokens - num_drafts + num_accepted


def append_tokens(
    llm_request: LlmRequest, new_tokens: tuple[int, ...], details: TokenDetails | None, now_ns: int
) -> FinishReason:
    """Append new tokens, up to the token that ends the sequence if there is one; return the finish reason. An
    end id is not appended."""
    end_ids, stop_words = llm_request.request.end_ids, llm_request.stop_words
    tokens, before = llm_request.tokens, len(llm_request.tokens)
    reason = FinishReason.NOT_FINISHED
    for token in new_tokens:
        if token in end_ids or token == GUIDE_END:
            reason = FinishReason.END_ID
            break
        tokens.append(token)
        if stop_words is not None and stop_words.matches(tokens, llm_request.num_generated):
            reason = FinishReason.STOP_WORDS
            break
        if len(tokens) == llm_request.max_length:
            reason = FinishReason.LENGTH
            break
    if llm_request.drafter is not None:
        llm_request.drafter.append(tokens[before:])
    if len(new_tokens) > 1:
        llm_request.num_accepted_tokens += min(len(new_tokens) - 1, len(tokens) - before)
    if details is not None:
        _keep_details(llm_request, details, len(tokens) - before)
    if new_tokens:
        _note_time(llm_request, now_ns)
    return reason


def advance_beams(llm_request: LlmRequest, candidates: BeamCandidates, now_ns: int) -> FinishReason:
    """Advance a beam search by one step; return the best beam's finish reason if the search has ended.

    Raises InvalidArgument if bans left no token for any beam.
    """
    search = llm_request.beams
    assert search is not None, f"request {llm_request.request_id} is not a beam search"
    search.advance(candidates)
    if search.has_found_nothing:
        raise no_token_left(llm_request)
    # All beams have the same number of tokens. For a beam search only the length of `tokens` is used.
    llm_request.tokens.append(candidates.token_ids[0])
    _note_time(llm_request, now_ns)
    return search.hypotheses()[0].finish_reason if search.done else FinishReason.NOT_FINISHED


def no_token_left(llm_request: LlmRequest) -> InvalidArgument:
    """Return the error for a sequence whose request bans every possible next token."""
    return InvalidArgument(
        *(joined(llm_request.request.banning_tensors, " and ") or ["the request"]),
        " must leave a token that may come next, got every token banned after "
        f"{llm_request.num_generated} generated",
    )


def keep_context(llm_request: LlmRequest, chunk: ContextChunk, details: ContextDetails) -> None:
    """Store the context outputs of a chunk's rows, except rows whose outputs were stored before a restart."""
    group = llm_request.group
    end = min(chunk.start + len(chunk.token_ids), group.request.prompt_length)
    num_known = group.num_context_rows - chunk.start
    if chunk.start + num_known >= end:
        return
    num_rows = end - chunk.start
    if details.logits:
        group.context_logits.append(_rows_from(num_known, details.logits, num_rows))
    for rows, data in zip(group.context_outputs, details.additional_outputs, strict=True):
        rows.append(_rows_from(num_known, data, num_rows))
    group.context_log_probs += details.log_probs[num_known:]
    group.num_context_rows = end


def _rows_from(first: int, data: bytes, num_rows: int) -> bytes:
    """Return the rows of `data` from index `first` on; `data` has `num_rows` rows of equal size."""
    return data[first * (len(data) // num_rows) :]


def _keep_details(llm_request: LlmRequest, details: TokenDetails, num_tokens: int) -> None:
    llm_request.log_probs += details.log_probs[:num_tokens]
    llm_request.drawn_log_probs += details.drawn_log_probs[:num_tokens]
    llm_request.top_log_probs += details.top_log_probs[:num_tokens]
    llm_request.logits += details.logits[:num_tokens]
    llm_request.additional_outputs += details.additional_outputs[:num_tokens]
    llm_request.cum_log_prob += sum(details.log_probs[:num_tokens])


def _note_time(llm_request: LlmRequest, now_ns: int) -> None:
    if not llm_request.first_token_ns:
        llm_request.first_token_ns = now_ns
    llm_request.last_token_ns = now_ns
    llm_request.num_iterations += 1
