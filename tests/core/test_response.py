"""Merging of waiting responses of one sequence."""

from __future__ import annotations

from array import array

import pytest

from inflight.core.request.request import FloatTensor
from inflight.core.request.response import Response, SequenceResult, TopLogProbs, merge_responses
from inflight.core.request.stop import FinishReason
from inflight.errors import StepFailed


def make_response(*tokens: int, reason: FinishReason = FinishReason.NOT_FINISHED, **fields) -> Response:
    final = reason is not FinishReason.NOT_FINISHED
    result = SequenceResult((tokens,), 3, (len(tokens),), (reason,), is_sequence_final=final, **fields)
    return Response(1, result, is_final=final)


def make_logits(*rows: float) -> FloatTensor:
    """Rows of two equal values."""
    return FloatTensor((len(rows), 2), array("f", [value for row in rows for value in (row, row)]).tobytes())


def test_deltas_are_concatenated_and_the_last_finish_reason_is_kept():
    merged = merge_responses([make_response(5, 6), make_response(7, reason=FinishReason.LENGTH)])
    assert merged == make_response(5, 6, 7, reason=FinishReason.LENGTH)


def test_details_are_concatenated_and_the_last_sum_is_kept():
    first, second = TopLogProbs((5,), (-1.0,)), TopLogProbs((6,), (-2.0,))
    merged = merge_responses(
        [
            make_response(
                5,
                log_probs=((-1.0,),),
                cum_log_probs=(-1.0,),
                top_log_probs=((first,),),
                generation_logits=(make_logits(1.0),),
                prompt_log_probs=(0.0, -3.0),
                context_logits=make_logits(8.0, 9.0),
            ),
            make_response(
                6,
                log_probs=((-2.0,),),
                cum_log_probs=(-3.0,),
                top_log_probs=((second,),),
                generation_logits=(make_logits(2.0),),
            ),
            make_response(log_probs=((),), cum_log_probs=(-3.0,), top_log_probs=((),)),
        ]
    ).result
    assert merged.log_probs == ((-1.0, -2.0),) and merged.cum_log_probs == (-3.0,)
    assert merged.top_log_probs == ((first, second),)
    assert merged.generation_logits == (make_logits(1.0, 2.0),)
    assert merged.prompt_log_probs == (0.0, -3.0) and merged.context_logits == make_logits(8.0, 9.0)


def test_the_models_own_log_probs_are_merged_too():
    merged = merge_responses(
        [
            make_response(5, log_probs=((-0.1,),), model_log_probs=((-1.0,),), cum_log_probs=(-1.0,)),
            make_response(6, log_probs=((-0.2,),), model_log_probs=((-2.0,),), cum_log_probs=(-3.0,)),
            make_response(log_probs=((),), cum_log_probs=(-3.0,)),
        ]
    ).result
    assert merged.log_probs == ((-0.1, -0.2),) and merged.model_log_probs == ((-1.0, -2.0),)
    assert merged.cum_log_probs == (-3.0,)


def test_each_response_of_streamed_beams_is_complete():
    earlier = make_response(5, is_cumulative=True, prompt_log_probs=(0.0,))
    later = make_response(5, 6, is_cumulative=True)
    assert merge_responses([earlier, later]) == make_response(
        5, 6, is_cumulative=True, prompt_log_probs=(0.0,)
    )


def test_an_error_replaces_waiting_responses():
    failed = Response(1, error=StepFailed("boom"), is_final=True)
    assert merge_responses([make_response(5), failed]) is failed


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIMED_OUT])
def test_waiting_tokens_of_a_stopped_sequence_are_kept(reason):
    merged = merge_responses([make_response(5, 6), make_response(reason=reason)])
    assert merged == make_response(5, 6, reason=reason)


def test_logits_of_a_response_without_tokens_are_merged():
    nothing = FloatTensor((0, 0), b"")
    merged = merge_responses(
        [
            make_response(5, generation_logits=(make_logits(1.0),)),
            make_response(reason=FinishReason.END_ID, generation_logits=(nothing,)),
        ]
    )
    assert merged.result.generation_logits == (make_logits(1.0),)
    assert merge_responses([make_response(generation_logits=(nothing,))] * 2).result.generation_logits == (
        nothing,
    )
