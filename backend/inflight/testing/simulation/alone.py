"""Compute the result that a request gets when it runs alone, and compare results with it.

The fake engine defines which tokens and logits follow a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.core.request.beam_search import Hypothesis
from inflight.core.request.request import Request
from inflight.core.request.response import SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason
from inflight.testing.fake_model import (
    Conditions,
    describe_tokens,
    expected_beam_steps,
    expected_logits,
    expected_tokens,
    log_softmax,
)


@dataclass(frozen=True)
class Expected:
    """Expected output of a sequence or a beam, without the prompt."""

    tokens: tuple[int, ...]
    reason: FinishReason
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float = 0.0
    top_log_probs: tuple[TopLogProbs, ...] = ()
    logits: tuple[bytes, ...] = ()

    def stopped_after(self, count: int, reason: FinishReason) -> Expected:
        """Return the output cut to its first `count` tokens."""
        log_probs = self.log_probs[:count]
        return replace(
            self,
            tokens=self.tokens[:count],
            reason=reason,
            log_probs=log_probs,
            cum_log_prob=sum(log_probs),
            top_log_probs=self.top_log_probs[:count],
            logits=self.logits[:count],
        )


def sequence_alone(
    request: Request, sequence_index: int, vocab_size: int, conditions: Conditions
) -> Expected:
    """Compute the output of a sequence without beams."""
    prompt = request.input_token_ids
    generated = expected_tokens(
        prompt,
        request.max_new_tokens,
        vocab_size,
        request.sampling,
        sequence_index=sequence_index,
        conditions=conditions,
    )
    count, reason = _end(request, generated)
    tokens = tuple(generated[:count])
    if not request.output.wants_details:
        return Expected(tokens, reason)
    logits = expected_logits(prompt, tokens, vocab_size, conditions=conditions)
    details = describe_tokens(logits, tokens, request.output)
    log_probs = details.log_probs
    return Expected(tokens, reason, log_probs, sum(log_probs), details.top_log_probs, details.logits)


def _end(request: Request, generated: list[int]) -> tuple[int, FinishReason]:
    for count in range(len(generated)):
        if generated[count] in request.end_ids:
            return count, FinishReason.END_ID
        so_far = generated[: count + 1]
        if any(tuple(so_far[-len(word) :]) == word for word in request.stop_words):
            return count + 1, FinishReason.STOP_WORDS
    return len(generated), FinishReason.LENGTH


def search_alone(request: Request, vocab_size: int, conditions: Conditions) -> list[list[Expected]]:
    """Compute a beam search's outputs after each of its steps."""
    steps = expected_beam_steps(request, vocab_size, conditions=conditions)
    return [[_of(beam) for beam in beams] for beams in steps]


def _of(beam: Hypothesis) -> Expected:
    return Expected(
        beam.token_ids,
        beam.finish_reason,
        beam.log_probs,
        beam.cum_log_prob,
        beam.top_log_probs,
        beam.logits,
    )


def compare_context(
    request: Request, first: SequenceResult, vocab_size: int, conditions: Conditions, is_whole: bool
) -> None:
    """Compare the prompt's log probabilities and logits in a request's first result.

    Unless `is_whole`, the result may have only those of the prompt's beginning.
    """
    prompt, output = request.input_token_ids, request.output
    logits = []
    if output.wants_context:
        logits = expected_logits(prompt[:1], (*prompt[1:], 0), vocab_size, conditions=conditions)
    if output.return_prompt_log_probs:
        found = [log_softmax(values)[token] for values, token in zip(logits, prompt[1:])]
        assert first.prompt_log_probs is not None
        count = None if is_whole else len(first.prompt_log_probs)
        assert first.prompt_log_probs == (0.0, *found)[:count]
    else:
        assert first.prompt_log_probs is None
    if output.return_context_logits:
        assert first.context_logits is not None
        count = None if is_whole else first.context_logits.shape[0]
        rows = [values.tobytes() for values in logits[:count]]
        assert first.context_logits.data == b"".join(rows)
        assert not rows or first.context_logits.shape == (len(rows), vocab_size)
    else:
        assert first.context_logits is None


def compare_outputs(
    request: Request, result: SequenceResult, expected: Sequence[Expected], vocab_size: int
) -> None:
    """Compare a result that has all tokens so far with the expected outputs, one for each beam.

    `result` may be the final one, streamed results merged, or any result of a streamed beam search.
    """
    output = request.output
    echoed = not (request.streaming or output.exclude_input_from_output)
    prompt = request.input_token_ids if echoed else ()
    assert result.output_token_ids == tuple((*prompt, *each.tokens) for each in expected)
    assert result.num_output_tokens == tuple(len(each.tokens) for each in expected)
    if not output.return_log_probs:
        assert result.log_probs is None and result.cum_log_probs is None
    else:
        assert result.log_probs == tuple(each.log_probs for each in expected)
        assert result.cum_log_probs is not None
        for total, each in zip(result.cum_log_probs, expected, strict=True):
            assert abs(total - each.cum_log_prob) < 1e-9
    tops = tuple(each.top_log_probs for each in expected)
    assert result.top_log_probs == (tops if output.num_top_log_probs else None)
    if output.return_generation_logits and not (request.streaming and request.sampling.uses_beams):
        found = [tensor.data for tensor in result.generation_logits or ()] or [b""] * len(expected)
        assert found == [b"".join(each.logits) for each in expected]
    else:
        assert result.generation_logits is None
