"""Convert the engine's responses to chunks of Dynamo's `LLMEngine.generate`."""

from __future__ import annotations

from typing import Any

from inflight.core.request.response import Response, SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason

_FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "length",
    FinishReason.CANCELLED: "cancelled",
}


class Chunks:
    """The chunks of one request, and its token counts so far.

    Args:
        prompt_length: Number of prompt tokens.
        tokens_per_block: Tokens per KV block.
    """

    def __init__(self, prompt_length: int, tokens_per_block: int) -> None:
        self._prompt_length = prompt_length
        self._tokens_per_block = tokens_per_block
        self._num_generated = 0
        self._num_cached = 0

    def take(self, response: Response) -> dict[str, Any]:
        """Return the chunk of a response without error; the last one has the usage."""
        result = response.result
        assert result is not None, "the response has an error"
        token_ids = list(result.output_token_ids[0])
        self._count(result)
        chunk: dict[str, Any] = {"token_ids": token_ids, "index": 0}
        if result.log_probs is not None:
            chunk["log_probs"] = list(result.log_probs[0])
        if result.top_log_probs is not None:
            chunk["top_logprobs"] = [_tops(tops) for tops in result.top_log_probs[0]]
        if response.is_final:
            chunk["finish_reason"] = _FINISH_REASONS[result.finish_reasons[0]]
            chunk["completion_usage"] = {
                "prompt_tokens": self._prompt_length,
                "completion_tokens": self._num_generated,
                "total_tokens": self._prompt_length + self._num_generated,
                "prompt_tokens_details": {"cached_tokens": self._num_cached},
            }
        return chunk

    def _count(self, result: SequenceResult) -> None:
        self._num_generated += len(result.output_token_ids[0])
        if result.perf_metrics is not None:
            self._num_cached = result.perf_metrics.cached_tokens(self._prompt_length, self._tokens_per_block)


def _tops(tops: TopLogProbs) -> list[dict[str, Any]]:
    """Return the likeliest tokens at one position; the frontend fills in their texts."""
    found = zip(tops.token_ids, tops.log_probs)
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": log_prob}
        for rank, (token_id, log_prob) in enumerate(found, 1)
    ]
