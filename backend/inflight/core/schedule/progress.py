"""What a device's answer means to a sequence: tokens appended, ends recognized, details kept.

Owns no state and frees nothing: `outcomes.py` does what follows from it. Loop thread.
"""

from __future__ import annotations

from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ContextChunk, ContextDetails, TokenDetails
from inflight.errors import InvalidArgument


def confirm_chunk(llm_request: LlmRequest, chunk: ContextChunk, num_new_tokens: int) -> None:
    """Count a chunk as computed; of draft tokens the accepted ones, which came back as new tokens but for one."""
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
    """Take new tokens up to the one that ends the sequence, if one does; an end id is not kept."""
    end_ids, stop_words = llm_request.request.end_ids, llm_request.stop_words
    tokens, before = llm_request.tokens, len(llm_request.tokens)
    reason = FinishReason.NOT_FINISHED
    for token in new_tokens:
        if token in end_ids:
            reason = FinishReason.END_ID
            break
        tokens.append(token)
        if stop_words is not None and stop_words.matches(tokens, llm_request.num_generated):
            reason = FinishReason.STOP_WORDS
            break
        if len(tokens) == llm_request.max_length:
            reason = FinishReason.LENGTH
            break
    if llm_request.lookup is not None:
        llm_request.lookup.append(tokens[before:])
    if len(new_tokens) > 1:
        llm_request.num_accepted_tokens += min(len(new_tokens) - 1, len(tokens) - before)
    if details is not None:
        _keep_details(llm_request, details, len(tokens) - before)
    if new_tokens:
        _note_time(llm_request, now_ns)
    return reason


def advance_beams(llm_request: LlmRequest, candidates: BeamCandidates, now_ns: int) -> FinishReason:
    """Take a step of a beam search; its end is that of its best beam. InvalidArgument if bans left it none."""
    search = llm_request.beams
    assert search is not None, f"request {llm_request.request_id} is no beam search"
    search.advance(candidates)
    if search.has_found_nothing:
        raise no_token_left(llm_request)
    # Beams differ in their tokens and agree in their number, which is all that is asked of these.
    llm_request.tokens.append(candidates.token_ids[0])
    _note_time(llm_request, now_ns)
    return search.hypotheses()[0].finish_reason if search.done else FinishReason.NOT_FINISHED


def no_token_left(llm_request: LlmRequest) -> InvalidArgument:
    """The error for a sequence that nothing may follow, because of what its request asks for."""
    names = " and ".join(llm_request.request.banning_tensors) or "the request"
    return InvalidArgument(
        f"{names} must leave a token that may come next, got every token banned after "
        f"{llm_request.num_generated} generated"
    )


def keep_context(llm_request: LlmRequest, chunk: ContextChunk, details: ContextDetails) -> None:
    """Context outputs of the rows that no earlier run has given already."""
    group = llm_request.group
    end = min(chunk.start + len(chunk.token_ids), group.request.prompt_length)
    num_known = group.num_context_rows - chunk.start
    if chunk.start + num_known >= end:
        return
    if details.logits:
        row_bytes = len(details.logits) // (end - chunk.start)
        group.context_logits.append(details.logits[num_known * row_bytes :])
    group.context_log_probs += details.log_probs[num_known:]
    group.num_context_rows = end


def _keep_details(llm_request: LlmRequest, details: TokenDetails, num_tokens: int) -> None:
    llm_request.log_probs += details.log_probs[:num_tokens]
    llm_request.drawn_log_probs += details.drawn_log_probs[:num_tokens]
    llm_request.top_log_probs += details.top_log_probs[:num_tokens]
    llm_request.logits += details.logits[:num_tokens]
    llm_request.cum_log_prob += sum(details.log_probs[:num_tokens])


def _note_time(llm_request: LlmRequest, now_ns: int) -> None:
    if not llm_request.first_token_ns:
        llm_request.first_token_ns = now_ns
    llm_request.last_token_ns = now_ns
    llm_request.num_iterations += 1
