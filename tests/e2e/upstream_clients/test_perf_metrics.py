"""Blocks and times of a request, alone and after another with the same prompt, as three clients read them.

A prompt that ends within its fourth block takes four blocks. When it is sent again, all four are found. The
first request has written to the last one, so that is copied, and the copy is the only new block.
"""

from __future__ import annotations

import json

import pytest

from inflight.text.tokenizer import Tokenizer
from tests.e2e.clients import wait_until

from . import batcher_client, text_client
from .conftest import PROMPT
from .test_generate import generate, generate_stream, post
from .wire import TENSORS_OF_PERF_METRICS, config_of

TOKENS_PER_BLOCK = 32
ALONE = {"alloc_new": 4, "alloc_total": 4, "reused": 0}
AGAIN = {"alloc_new": 1, "alloc_total": 1, "reused": 4}


def long_prompt(tokenizer: Tokenizer, name: str) -> str:
    """Return a text of more than three and less than four blocks, which begins with the name."""
    text = f"{name} = []\n"
    while len(tokenizer.encode(text)) <= 3 * TOKENS_PER_BLOCK + 4:
        text += f"self.{name} = load(path)\n"
    assert len(tokenizer.encode(text)) < 4 * TOKENS_PER_BLOCK - 2
    return text


def check(metrics: dict, expected: dict[str, int], streaming: bool = False) -> None:
    """Check the values that the original checks: block counts, no drafts, and times, the last at the end."""
    assert {name: int(metrics[f"kv_cache_{name}_blocks"]) for name in expected} == expected
    drafts = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    assert [float(metrics[name]) for name in drafts] == [0, 0, 0]
    assert all(int(metrics[f"{name}_time_ns"]) > 0 for name in ("arrival", "first_scheduled", "first_token"))
    assert streaming or int(metrics["last_token_time_ns"]) > 0


def test_metrics_are_returned_over_generate_stream(perf_metrics_server, tokenizer):
    """A request that does not stream has one event, where the acceptance rate is written as 0.0."""
    body = {
        "text_input": long_prompt(tokenizer, "events"),
        "max_tokens": 50,
        "pad_id": 2,
        "end_id": 2,
        "return_perf_metrics": True,
    }
    for expected in (ALONE, AGAIN):
        status, text = post(perf_metrics_server, "ensemble/generate_stream", body)
        assert status == 200 and '"acceptance_rate":0.0' in text
        check(json.loads(text.strip().removeprefix("data: ")), expected)
    assert len(generate_stream(perf_metrics_server, body)) == 1


def test_metrics_are_returned_over_generate(perf_metrics_server, tokenizer):
    body = {
        "text_input": long_prompt(tokenizer, "answers"),
        "max_tokens": 50,
        "pad_id": 2,
        "end_id": 2,
        "return_perf_metrics": True,
    }
    for expected in (ALONE, AGAIN):
        check(generate(perf_metrics_server, body), expected)


@pytest.mark.parametrize("response", [0, -1], ids=["first", "last"])
def test_metrics_of_streamed_text_are_returned(perf_metrics_server, tokenizer, response):
    """The first response has the metrics that the original reads from its log; in the last, blocks of
    generated tokens are not counted."""
    text = long_prompt(tokenizer, "texts" if response else "words")
    flags = text_client.Flags(streaming=True, return_perf_metrics=True)
    for expected in (ALONE, AGAIN):
        outputs = text_client.run(perf_metrics_server, [text], flags).outputs[response]
        check({name: outputs[name].item() for name in TENSORS_OF_PERF_METRICS}, expected, streaming=True)


def test_metrics_of_streamed_ids_are_returned(perf_metrics_server, tokenizer):
    prompt = tokenizer.encode(long_prompt(tokenizer, "ids"))
    flags = batcher_client.Flags(request_output_len=200, streaming=True, return_perf_metrics=True)
    for expected in (ALONE, AGAIN):
        (outputs,) = batcher_client.run(perf_metrics_server, prompt, flags).outputs
        check({name: value[0] for name, value in outputs.items()}, expected, streaming=True)


def test_a_filled_in_decoupled_model_streams_without_the_prompt(perf_metrics_server, prompt):
    assert config_of(perf_metrics_server, "tensorrt_llm").model_transaction_policy.decoupled
    flags = batcher_client.Flags(request_output_len=8, end_id=-1, streaming=True)

    def is_streamed() -> bool:
        outcome = batcher_client.run(perf_metrics_server, prompt, flags)
        assert len(outcome.generated[0]) == 8
        return outcome.num_responses > 1

    wait_until(is_streamed)  # a slow sender may merge all responses into one
    (event,) = generate_stream(perf_metrics_server, {"text_input": PROMPT, "max_tokens": 8, "end_id": -1})
    assert not event["text_output"].startswith(PROMPT)
