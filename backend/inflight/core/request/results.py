"""Makes the responses of a sequence: turns an LlmRequest into a SequenceResult.

Selects the tokens and details for a response, and counts streamed tokens. Used by `outcomes.py` and
`endings.py`, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from inflight.additional_outputs import CONTEXT, GENERATION
from inflight.core.kv.block_keys import CacheRules
from inflight.core.kv.kv_cache_manager import BlockCounts
from inflight.core.request.beam_search import BeamSearch
from inflight.core.request.llm_request import LlmRequest, RequestGroup
from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.response import (
    PerfMetrics,
    RequestEnding,
    Response,
    ReturnedOutput,
    SequenceResult,
)
from inflight.core.request.stop import CUT_SHORT, FinishReason

BlockCounter = Callable[[LlmRequest], BlockCounts]
"""A function that returns a sequence's numbers of KV blocks over all its starts: newly taken, found in the
cache, and not found."""


def make_response(
    llm_request: LlmRequest,
    block_counts: BlockCounter,
    is_final: bool = False,
    ending: RequestEnding | None = None,
) -> Response:
    """Return the response with the sequence's result (`make_result`).

    Args:
        llm_request: The sequence.
        block_counts: See `make_result`.
        is_final: Whether this is the request's last response.
        ending: How the request has ended.
    """
    return Response(llm_request.request_id, make_result(llm_request, block_counts), None, is_final, ending)


def ended_before_start(request: Request, reason: FinishReason) -> list[Response]:
    """Return the last responses of a request whose sequences all ended before anything was computed."""
    sequences = RequestGroup(request, 0, CacheRules(None), request.arrival_time_ns).sequences
    for llm_request in sequences:
        llm_request.finish(reason)
    return [make_response(each, lambda _: BlockCounts(0, 0, 0), each is sequences[-1]) for each in sequences]


def make_result(llm_request: LlmRequest, block_counts: BlockCounter) -> SequenceResult:
    """Return a sequence's current result: for a streaming request the new tokens since the last call, otherwise
    all.

    Args:
        llm_request: The sequence. The tokens in the result are counted as streamed, and their details are dropped.
        block_counts: Called if the request wants perf metrics.
    """
    request, reason = llm_request.request, llm_request.finish_reason
    if reason is FinishReason.NOT_FINISHED and llm_request.streams_tokens_only:
        return _delta(llm_request)
    if llm_request.beams is not None:
        result = _beams_result(llm_request, llm_request.beams)
    else:
        result = _sequence_result(llm_request)
    if request.output.return_perf_metrics:
        result = replace(result, perf_metrics=_metrics(llm_request, block_counts(llm_request)))
    return result


_RUNS_ON = (FinishReason.NOT_FINISHED,)


def _delta(llm_request: LlmRequest) -> SequenceResult:
    """Return a result with new tokens only. Called for every stream in every iteration, so it must be fast."""
    tokens = tuple(llm_request.tokens[llm_request.prompt_length + llm_request.num_streamed_tokens :])
    llm_request.num_streamed_tokens += len(tokens)
    return SequenceResult(
        (tokens,),
        llm_request.prompt_length,
        (len(tokens),),
        _RUNS_ON,
        llm_request.sequence_index,
        num_iterations=llm_request.num_iterations,
    )


def _sequence_result(llm_request: LlmRequest) -> SequenceResult:
    request, reason = llm_request.request, llm_request.finish_reason
    first = llm_request.num_streamed_tokens
    tokens = tuple(llm_request.tokens[request.prompt_length + first :])
    llm_request.num_streamed_tokens += len(tokens)
    echoed = not (request.streaming or request.output.exclude_input_from_output)
    result = SequenceResult(
        ((*request.input_token_ids, *tokens) if echoed else tokens,),
        request.prompt_length,
        (len(tokens),),
        (reason,),
        llm_request.sequence_index,
        reason is not FinishReason.NOT_FINISHED,
        num_iterations=llm_request.num_iterations,
    )
    output = request.output
    if output.wants_details:
        log_probs = (tuple(llm_request.log_probs),) if output.return_log_probs else None
        drawn = (tuple(llm_request.drawn_log_probs),) if llm_request.drawn_log_probs else None
        result = replace(
            result,
            log_probs=drawn or log_probs,
            model_log_probs=log_probs if drawn else None,
            cum_log_probs=(llm_request.cum_log_prob,) if output.return_log_probs else None,
            top_log_probs=(tuple(llm_request.top_log_probs),) if output.num_top_log_probs else None,
            generation_logits=(_stacked(llm_request.logits),) if output.return_generation_logits else None,
        )
    if output.additional_outputs:
        result = replace(result, additional_outputs=_additional_outputs(llm_request))
    if output.wants_details or output.additional_outputs:
        llm_request.forget_details()
    return _with_context(result, llm_request) if first == 0 else result


def _beams_result(llm_request: LlmRequest, beams: BeamSearch) -> SequenceResult:
    request, output = llm_request.request, llm_request.request.output
    best, reason = beams.hypotheses(), llm_request.finish_reason
    final = reason is not FinishReason.NOT_FINISHED
    # CANCELLED, TIMED_OUT and NOT_FINISHED apply to all beams.
    is_common = not final or reason in CUT_SHORT
    echoed = not (request.streaming or output.exclude_input_from_output)
    prompt = request.input_token_ids if echoed else ()
    result = SequenceResult(
        tuple((*prompt, *beam.token_ids) for beam in best),
        request.prompt_length,
        tuple(len(beam.token_ids) for beam in best),
        tuple(reason if is_common else beam.finish_reason for beam in best),
        is_sequence_final=final,
        is_cumulative=request.streaming,
        num_iterations=llm_request.num_iterations,
        log_probs=tuple(beam.log_probs for beam in best) if output.return_log_probs else None,
        cum_log_probs=tuple(beam.cum_log_prob for beam in best) if output.return_log_probs else None,
        top_log_probs=tuple(beam.top_log_probs for beam in best) if output.num_top_log_probs else None,
        generation_logits=tuple(_stacked(beam.logits) for beam in best)
        if output.return_generation_logits and not request.streaming
        else None,
    )
    first, llm_request.num_streamed_tokens = llm_request.num_streamed_tokens == 0, llm_request.num_generated
    return _with_context(result, llm_request) if first else result


def _additional_outputs(llm_request: LlmRequest) -> tuple[ReturnedOutput, ...]:
    rows = llm_request.additional_outputs
    return tuple(
        ReturnedOutput(GENERATION + output.name, (_stacked([row[index] for row in rows]),))
        for index, output in enumerate(llm_request.request.output.additional_outputs)
    )


def _with_context(result: SequenceResult, llm_request: LlmRequest) -> SequenceResult:
    group, output = llm_request.group, llm_request.request.output
    if not output.wants_context:
        return result
    return replace(
        result,
        prompt_log_probs=(0.0, *group.context_log_probs) if output.return_prompt_log_probs else None,
        context_logits=_prompt_rows(group.context_logits, group) if output.return_context_logits else None,
        additional_outputs=(*_gathered_outputs(group), *result.additional_outputs),
    )


def _gathered_outputs(group: RequestGroup) -> Iterator[ReturnedOutput]:
    for output, pieces in zip(group.request.output.gathered_outputs, group.context_outputs, strict=True):
        yield ReturnedOutput(CONTEXT + output.name, (_prompt_rows(pieces, group),))


def _prompt_rows(pieces: list[bytes], group: RequestGroup) -> FloatTensor:
    """Return the prompt's rows as one tensor, and drop the pieces unless other sequences still have to return
    them."""
    tensor = _stacked(pieces, group.num_context_rows)
    pieces[:] = [tensor.data] if len(group.sequences) > 1 else []
    return tensor


def _stacked(pieces: list[bytes] | tuple[bytes, ...], num_rows: int | None = None) -> FloatTensor:
    """Return a tensor [rows, row width] from pieces of rows; each piece is one row unless `num_rows` is given."""
    data = b"".join(pieces)
    rows = len(pieces) if num_rows is None else num_rows
    return FloatTensor((rows, len(data) // (4 * rows) if rows else 0), data)


def _metrics(llm_request: LlmRequest, blocks: BlockCounts) -> PerfMetrics:
    ended = llm_request.finish_reason is not FinishReason.NOT_FINISHED
    return PerfMetrics(
        arrival_time_ns=llm_request.request.arrival_time_ns,
        first_scheduled_time_ns=llm_request.first_scheduled_ns,
        first_token_time_ns=llm_request.first_token_ns,
        last_token_time_ns=llm_request.last_token_ns if ended else 0,
        num_new_blocks=blocks.new,
        num_reused_blocks=blocks.reused,
        num_missed_blocks=blocks.missed,
        num_draft_tokens=llm_request.num_draft_tokens,
        num_accepted_draft_tokens=llm_request.num_accepted_tokens,
        first_iteration=llm_request.first_iteration,
        last_iteration=llm_request.last_iteration,
    )
