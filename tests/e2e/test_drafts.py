"""Drafts on the real server: they are accepted if they are right, and never change a token."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.text.tokenizer import Tokenizer

from .clients import ask, completion

PROMPT = "class Reader:\n    def __init__(self, "
NUM_TOKENS = 16
VOCABULARY = 3072
SAMPLED = {"runtime_top_p": 1.0, "temperature": 1.3, "random_seed": 5}


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


def counts(answer) -> tuple[int, int]:
    """Return the numbers of accepted and of verified draft tokens."""
    names = ("total_accepted_draft_tokens", "total_draft_tokens")
    accepted, verified = (answer.outputs[name].item() for name in names)
    rate = answer.outputs["acceptance_rate"].item()
    assert rate == pytest.approx(accepted / verified if verified else 0.0)
    return accepted, verified


@pytest.mark.covers("draft_input_ids", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
@pytest.mark.parametrize("controls", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_right", [0, 3, 6])
def test_a_draft_does_not_change_tokens(exact_server, prompt, controls, num_right):
    request = {"input_ids": prompt, "request_output_len": NUM_TOKENS, "return_perf_metrics": True, **controls}
    plain = completion(exact_server.grpc, **request)
    assert counts(plain) == (0, 0)
    wrong = [(token + 1) % VOCABULARY for token in plain.ids[num_right:6]]
    drafted = completion(exact_server.grpc, draft_input_ids=plain.ids[:num_right] + wrong, **request)
    assert drafted.ids == plain.ids
    assert counts(drafted) == (num_right, 6)


def test_a_right_draft_is_in_the_first_response(exact_server, prompt):
    request = {"input_ids": prompt, "request_output_len": NUM_TOKENS}
    plain = completion(exact_server.grpc, **request)
    answers = ask(exact_server.grpc, streaming=True, draft_input_ids=plain.ids[:6], **request)
    assert answers[0].ids[:7] == plain.ids[:7]
    assert [token for answer in answers for token in answer.ids] == plain.ids


def logits_of(oracle, prompt: list[int], draft: list[int]) -> np.ndarray:
    """Return the logits that a draft model identical to the target would send."""
    return oracle.logits([*prompt, *draft])[len(prompt) - 1 : -1].numpy()[np.newaxis]


@pytest.mark.covers("draft_logits")
def test_drafts_sampled_from_the_targets_distribution_are_accepted(exact_server, oracle, prompt):
    """p_target / p_draft is 1 everywhere, so any drafted token is accepted."""
    draft = [100, 200, 300, 400]
    answer = completion(
        exact_server.grpc,
        input_ids=prompt,
        request_output_len=NUM_TOKENS,
        draft_input_ids=draft,
        draft_logits=logits_of(oracle, prompt, draft),
        runtime_top_p=1.0,
        return_perf_metrics=True,
    )
    assert answer.ids[:4] == draft and counts(answer) == (4, 4)


@pytest.mark.covers("draft_acceptance_threshold")
@pytest.mark.parametrize(("threshold", "accepted"), [(0.0, 3), (1e30, 0)])
def test_an_acceptance_threshold_replaces_random_acceptance(
    exact_server, oracle, prompt, threshold, accepted
):
    draft = [100, 200, 300]
    sure = np.full((1, 3, VOCABULARY), -50.0, np.float32)
    sure[0, range(3), draft] = 0.0
    request = {
        "input_ids": prompt,
        "request_output_len": NUM_TOKENS,
        "draft_input_ids": draft,
        "draft_logits": sure,
        "return_perf_metrics": True,
        "runtime_top_p": 1.0,
    }
    by_chance = completion(exact_server.grpc, **request)
    assert counts(by_chance)[0] == 0, "a sure draft of an unlikely token is refused"
    answer = completion(exact_server.grpc, draft_acceptance_threshold=threshold, **request)
    assert counts(answer)[0] == accepted
    assert answer.ids[:accepted] == draft[:accepted]


@pytest.mark.covers("prompt_lookup_num_tokens")
@pytest.mark.parametrize("controls", [{}, {**SAMPLED, "temperature": 0.3}], ids=["greedy", "sampled"])
def test_prompt_lookup_changes_no_token_and_is_accepted_in_repetitive_text(exact_server, tokenizer, controls):
    prompt = tokenizer.encode("x = [1, 2, 3]\n" * 8)
    request = {"input_ids": prompt, "request_output_len": 40, "return_perf_metrics": True, **controls}
    plain = completion(exact_server.grpc, **request)
    guessed = completion(exact_server.grpc, prompt_lookup_num_tokens=6, **request)
    assert guessed.ids == plain.ids
    accepted, verified = counts(guessed)
    assert verified > 0 and accepted > 10


def test_ensemble_supports_prompt_lookup(exact_server):
    request = {"text_input": "x = [1, 2, 3]\n" * 8, "max_tokens": 40, "return_perf_metrics": True}
    (plain,) = ask(exact_server.grpc, "ensemble", **request)
    (guessed,) = ask(exact_server.grpc, "ensemble", prompt_lookup_num_tokens=6, **request)
    assert guessed.text == plain.text
    assert guessed.outputs["total_accepted_draft_tokens"].item() > 10
