"""Conversion of responses that an engine rarely makes: joined, ragged, with drafts."""

from __future__ import annotations

from array import array

import pytest

from inflight.core.request.request import FloatTensor, OutputOptions
from inflight.core.request.response import PerfMetrics, Response, SequenceResult
from inflight.core.request.stop import FinishReason
from inflight.executor.results import Answers, ResponseOptions

ON, LENGTH = FinishReason.NOT_FINISHED, FinishReason.LENGTH
VOCABULARY = 3


def logits(*rows: float) -> FloatTensor:
    """Return rows with one value each."""
    return FloatTensor(
        (len(rows), VOCABULARY), array("f", [v for v in rows for _ in range(VOCABULARY)]).tobytes()
    )


def make_answers(streaming: bool = True, repeats: bool = False, **output) -> Answers:
    return Answers(ResponseOptions(streaming, repeats, 4, VOCABULARY, None, OutputOptions(**output)), 1)


def delta(*tokens: int, final: bool = False, index: int = 0, **fields) -> Response:
    """Return a response with streamed tokens of one sequence."""
    reason = LENGTH if final else ON
    return Response(
        1, SequenceResult((tokens,), 2, (len(tokens),), (reason,), index, final, **fields), None, final
    )


def results(answers: Answers, *responses: Response) -> list:
    """Add responses in order, convert them in reverse order, and return the results."""
    added = [answers.add(response) for response in responses]
    return [answer.to_response().result for answer in reversed(added)][::-1]


def test_several_tokens_of_one_iteration_are_in_one_result() -> None:
    first, last = results(
        make_answers(return_generation_logits=True),
        delta(5, 6, generation_logits=(logits(1, 2),), num_iterations=1),
        delta(7, final=True, generation_logits=(logits(3),), num_iterations=2),
    )
    assert (first.output_token_ids, last.output_token_ids) == ([[5, 6]], [[7]])
    assert first.generation_logits[:, 0, 0].tolist() == [1, 2]
    assert (first.avg_decoded_tokens_per_iter, last.avg_decoded_tokens_per_iter) == (2.0, 1.5)


def test_streams_may_repeat_all_tokens_of_each_sequence() -> None:
    found = results(
        make_answers(repeats=True, return_log_probs=True),
        delta(5, log_probs=((-1.0,),)),
        delta(15, index=1, log_probs=((-2.0,),)),
        delta(6, log_probs=((-3.0,),)),
        delta(16, index=1, final=True, log_probs=((-4.0,),)),
    )
    assert [each.output_token_ids[0] for each in found] == [[5], [15], [5, 6], [15, 16]]
    assert [each.log_probs[0] for each in found] == [[-1.0], [-2.0], [-1.0, -3.0], [-2.0, -4.0]]


def test_a_last_response_without_tokens_has_no_logits_of_tokens() -> None:
    _, last = results(
        make_answers(return_generation_logits=True, return_context_logits=True),
        delta(5, generation_logits=(logits(1),), context_logits=logits(8, 9)),
        delta(final=True, generation_logits=(FloatTensor((0, 0), b""),)),
    )
    assert last.output_token_ids == [[]]
    assert last.generation_logits.shape == (0, 1, VOCABULARY)
    assert last.context_logits[:, 0].tolist() == [8, 9]


def test_streamed_beams_replace_earlier_ones_except_context_outputs() -> None:
    def beams(count: int, **fields) -> Response:
        ids = tuple(tuple(range(beam, beam + count)) for beam in (5, 8))
        log_probs = tuple((-1.0,) * count for _ in ids)
        result = SequenceResult(
            ids, 2, (count, count), (ON, ON), is_cumulative=True, log_probs=log_probs, **fields
        )
        return Response(1, result)

    found = results(
        make_answers(repeats=True, return_log_probs=True, return_context_logits=True),
        beams(1, context_logits=logits(8, 9)),
        beams(2),
        beams(3),
    )
    assert [each.output_token_ids for each in found] == [
        [[5], [8]],
        [[5, 6], [8, 9]],
        [[5, 6, 7], [8, 9, 10]],
    ]
    assert [len(each.log_probs[1]) for each in found] == [1, 2, 3]
    assert all(each.context_logits.shape == (2, VOCABULARY) for each in found)


def test_rows_of_beams_that_end_early_are_padded() -> None:
    tensors = (logits(1, 2, 3), logits(4))
    whole = SequenceResult(
        ((5, 6, 7), (8,)), 2, (3, 1), (LENGTH, LENGTH), is_sequence_final=True, generation_logits=tensors
    )
    (found,) = results(make_answers(False, return_generation_logits=True), Response(1, whole, None, True))
    assert found.generation_logits[:, :, 0].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]


def test_counts_of_blocks_and_drafts_are_in_the_perf_metrics() -> None:
    metrics = PerfMetrics(1_000, 2_000, 3_000, 4_000, 5, 3, 1, 8, 6, 10, 12)
    (found,) = results(make_answers(return_perf_metrics=True), delta(5, final=True, perf_metrics=metrics))
    told = found.request_perf_metrics
    assert told.kv_cache_metrics.num_new_allocated_blocks == 5
    assert told.speculative_decoding.acceptance_rate == 0.75
    assert (told.first_iter, told.last_iter, told.iter) == (9, 11, 11)
    assert told.timing_metrics.last_token_time.microseconds == 4


@pytest.mark.parametrize(
    ("num_tokens", "num_reused", "num_missed", "rate"),
    [(2, 0, 1, 0.0), (8, 0, 2, 0.0), (9, 2, 1, 2 / 3), (9, 3, 0, 1)],
)
def test_missed_blocks_include_the_prompts_last_block(
    num_tokens: int, num_reused: int, num_missed: int, rate: float
) -> None:
    """As in NVIDIA's tests, the last block counts whether it is full or not."""
    asked = ResponseOptions(
        False, False, 4, VOCABULARY, None, OutputOptions(return_perf_metrics=True), tokens_per_block=4
    )
    metrics = PerfMetrics(1_000, 2_000, 3_000, 4_000, num_reused_blocks=num_reused)
    response = Response(
        1, SequenceResult(((5,),), num_tokens, (1,), (LENGTH,), 0, True, perf_metrics=metrics), None, True
    )
    told = results(Answers(asked, 1), response)[0].request_perf_metrics.kv_cache_metrics
    assert (told.num_missed_blocks, told.kv_cache_hit_rate) == (num_missed, pytest.approx(rate))
