"""The engine's responses become chunks as Dynamo's frontend reads them."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.core.request.response import PerfMetrics, Response, SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason
from inflight.dynamo.chunks import Chunks


def response(*tokens: int, reason: FinishReason = FinishReason.NOT_FINISHED, **fields: Any) -> Response:
    is_final = reason is not FinishReason.NOT_FINISHED
    result = SequenceResult((tokens,), 40, (len(tokens),), (reason,), is_sequence_final=is_final, **fields)
    return Response(1, result, is_final=is_final)


def test_the_last_chunk_has_the_reason_and_the_usage() -> None:
    chunks = Chunks(40, 16)
    metrics = PerfMetrics(num_reused_blocks=2)
    assert chunks.take(response(7, 8, perf_metrics=metrics)) == {"token_ids": [7, 8], "index": 0}
    assert chunks.take(response(9, reason=FinishReason.LENGTH, perf_metrics=metrics)) == {
        "token_ids": [9],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 40,
            "completion_tokens": 3,
            "total_tokens": 43,
            "prompt_tokens_details": {"cached_tokens": 32},
        },
    }


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (FinishReason.END_ID, "stop"),
        (FinishReason.STOP_WORDS, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.TIMED_OUT, "length"),
        (FinishReason.CANCELLED, "cancelled"),
    ],
)
def test_every_finish_reason_has_a_name(reason: FinishReason, told: str) -> None:
    chunk = Chunks(3, 16).take(response(reason=reason))
    assert (chunk["token_ids"], chunk["finish_reason"]) == ([], told)


def test_log_probs_stand_beside_the_tokens() -> None:
    tops = (TopLogProbs((7, 5), (-0.5, -1.0)), TopLogProbs((6, 8), (-0.25, -2.0)))
    chunk = Chunks(40, 16).take(response(7, 8, log_probs=((-0.5, -2.0),), top_log_probs=(tops,)))
    assert chunk["log_probs"] == [-0.5, -2.0]
    assert chunk["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 7, "token": None, "logprob": -0.5},
            {"rank": 2, "token_id": 5, "token": None, "logprob": -1.0},
        ],
        [
            {"rank": 1, "token_id": 6, "token": None, "logprob": -0.25},
            {"rank": 2, "token_id": 8, "token": None, "logprob": -2.0},
        ],
    ]
