"""`tensorrt_llm_bls` on a real server: a draft model changes the time of a text, but not the text."""

from __future__ import annotations

from itertools import pairwise

import pytest

from .clients import Answer, Stream, ask, generate, wait_for_several, wait_until

PROMPT = "class Reader:\n    def __init__(self, "
NUM_TOKENS = 24
REQUEST = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "end_id": -1}
SAMPLED = {"top_k": 20, "temperature": 0.8, "seed": 2**63 + 5}


def only(answers: list[Answer]) -> Answer:
    (answer,) = answers
    assert answer.error is None, answer.error
    return answer


def drafted(server, **tensors) -> Answer:
    asked = {**REQUEST, "num_draft_tokens": 4, "return_perf_metrics": True, **tensors}
    return only(ask(server.grpc, "tensorrt_llm_bls", **asked))


def accepted(answer: Answer) -> float:
    assert answer.outputs["total_draft_tokens"].item() >= 8
    return answer.outputs["acceptance_rate"].item()


@pytest.mark.covers("num_draft_tokens", "use_draft_logits")
@pytest.mark.parametrize("weighs", [False, True])
def test_greedy_drafted_text_equals_that_of_the_target_model(pair_server, oracle, tokenizer, weighs):
    """The text equals that of transformers; a draft model in bfloat16 is right nearly always."""
    ids = oracle.greedy((0, *tokenizer.encode(PROMPT)), NUM_TOKENS)
    answer = drafted(pair_server, use_draft_logits=weighs)
    assert answer.text == tokenizer.decode(ids)
    assert answer.finish_reason == "LENGTH" and accepted(answer) > 0.5


def test_sampled_drafted_text_equals_that_of_the_target_model_with_the_same_seed(pair_server):
    (plain,) = ask(pair_server.grpc, "ensemble", **REQUEST, **SAMPLED)
    answer = drafted(pair_server, **SAMPLED)
    assert answer.text == plain.text and accepted(answer) > 0.5


def test_sampled_drafts_of_nearly_the_same_model_are_nearly_always_accepted(pair_server):
    """Drafts sampled with another temperature than that of their logits would be rejected more often."""
    answers = [
        drafted(pair_server, use_draft_logits=True, top_p=1.0, temperature=0.5, seed=seed)
        for seed in range(3)
    ]
    assert sum(map(accepted, answers)) / 3 > 0.95
    assert len({answer.text for answer in answers}) == 3


def test_streamed_drafted_texts_add_up_to_the_whole(pair_server):
    whole = drafted(pair_server).text
    for tensors in ({"num_draft_tokens": 4}, {}):

        def streamed(tensors: dict = tensors) -> list[str]:
            answers = ask(pair_server.grpc, "tensorrt_llm_bls", **REQUEST, stream=True, **tensors)
            texts = [answer.text for answer in answers if answer.outputs]
            assert texts[-1] == whole
            assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
            return texts

        wait_for_several(streamed)


def test_http_generate_gives_the_drafted_text(pair_server):
    body = {**REQUEST, "num_draft_tokens": 4}
    assert generate(pair_server.http, "tensorrt_llm_bls", **body)["text_output"] == drafted(pair_server).text


def test_many_drafted_requests_run_at_once(pair_server):
    alone = drafted(pair_server).text
    with Stream(pair_server.grpc) as stream:
        for number in range(8):
            stream.send("tensorrt_llm_bls", str(number), **REQUEST, num_draft_tokens=number % 5)
        answers = [stream.receive()[1] for _ in range(8)]
    assert [answer.text for answer in answers] == [alone] * 8


@pytest.mark.parametrize("by", ["stop", "cancel"])
def test_a_stop_or_cancellation_ends_a_drafted_request(pair_server, by):
    asked = {**REQUEST, "max_tokens": 900, "num_draft_tokens": 2, "stream": True}
    with Stream(pair_server.grpc) as stream:
        stream.send("tensorrt_llm_bls", "long", **asked)
        stream.receive()
        if by == "stop":
            with Stream(pair_server.grpc) as other:
                other.send("tensorrt_llm_bls", "long", stop=True)
                other.receive()
            last = list(stream.until_final())[-1]
            assert last.error is None and last.finish_reason == "CANCELLED"
        else:
            stream.cancel()

    def is_free() -> bool:
        """Return whether a request's id can be used again."""
        with Stream(pair_server.grpc) as again:
            again.send("tensorrt_llm_bls", "long", **{**REQUEST, "max_tokens": 1})
            return again.receive()[1].error is None

    wait_until(is_free)


def test_ensemble_refuses_drafting(pair_server):
    (refused,) = ask(pair_server.grpc, "ensemble", **REQUEST, num_draft_tokens=4)
    assert "tensorrt_llm_draft_model_name" in str(refused.error)
