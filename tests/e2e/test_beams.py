"""Beam search on the real server finds transformers' beams, in every form of request."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.testing.fake_model import expected_beam_steps, expected_beams
from inflight.text.tokenizer import Tokenizer

from .clients import Answer, ask, completion, infer, wait_for_several
from .conftest import FAKE_VOCABULARY

PROMPT = "def parse_args(argv):\n    parser = "
NUM_TOKENS = 10
EARLY_STOPPING = {0: False, 1: True, 2: "never"}
GRID = list(itertools.product((2, 4), (0.0, 1.0, 2.0), EARLY_STOPPING))
PLAIN = (5, 6, 7, 8, 9)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(PROMPT))


@pytest.fixture(scope="module")
def end_id(oracle, prompt) -> int:
    """Return a token with which some beams end early, and others do not."""
    found = oracle.beams(prompt, NUM_TOKENS, num_beams=4, num_return_sequences=4)
    holders = [set(tokens[2:8]) - set(tokens[:2]) for tokens, _ in found]
    counts = {token: sum(token in held for held in holders) for token in set().union(*holders)}
    return min(token for token, count in counts.items() if count == max(counts.values()))


def scored_by_transformers(oracle, prompt, end_id: int, **options) -> list[tuple[list[int], float]]:
    """Return the tokens before the end id and the final score of each beam."""
    found = oracle.beams(prompt, NUM_TOKENS, end_id=end_id, pad_token_id=end_id, **options)
    return [(list(itertools.takewhile(lambda token: token != end_id, ids)), score) for ids, score in found]


def of_transformers(oracle, prompt, end_id: int, **options) -> list[list[int]]:
    return [tokens for tokens, _ in scored_by_transformers(oracle, prompt, end_id, **options)]


@pytest.mark.covers("beam_width", "len_penalty", "early_stopping", "cum_log_probs", "output_log_probs")
@pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), GRID)
def test_beams_equal_those_of_transformers(
    exact_server, oracle, prompt, end_id, width, length_penalty, early_stopping
):
    expected = scored_by_transformers(
        oracle,
        prompt,
        end_id,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=EARLY_STOPPING[early_stopping],
    )
    answer = completion(
        exact_server.grpc,
        input_ids=list(prompt),
        request_output_len=NUM_TOKENS,
        end_id=end_id,
        beam_width=width,
        len_penalty=length_penalty,
        early_stopping=early_stopping,
        return_log_probs=True,
    )
    assert answer.beams == [tokens for tokens, _ in expected]
    log_probs, sums = answer.outputs["output_log_probs"], answer.outputs["cum_log_probs"]
    assert log_probs.shape[:2] == sums.shape == (1, width)
    reasons = answer.outputs["finish_reason"][0].tolist()
    for row, ((tokens, score), reason) in enumerate(zip(expected, reasons, strict=True)):
        length, ended = len(tokens), reason == b"END_ID"
        assert sums[0, row] / (length + ended) ** length_penalty == pytest.approx(score, abs=1e-4)
        if not ended:  # otherwise the sum includes the end id's log prob, which is not returned
            assert sums[0, row] == pytest.approx(log_probs[0, row, :length].sum(), abs=1e-4)
        assert not log_probs[0, row, length:].any()


@pytest.mark.covers("length_penalty")
def test_length_penalty_of_ensemble_reaches_the_search(exact_server, oracle, tokenizer, prompt, end_id):
    options = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 2.0}
    expected = of_transformers(oracle, prompt, end_id, **options)
    (answer,) = ask(
        exact_server.grpc,
        "ensemble",
        text_input=PROMPT,
        max_tokens=NUM_TOKENS,
        end_id=end_id,
        beam_width=4,
        length_penalty=2.0,
        exclude_input_in_output=True,
    )
    texts = [text.decode() for text in answer.outputs["text_output"]]
    assert texts == [tokenizer.decode([*prompt, *tokens])[len(PROMPT) :] for tokens in expected]


@pytest.mark.covers("num_return_sequences", "pad_id", "finish_reason")
@pytest.mark.parametrize("pad_id", [-1, 77])
def test_the_best_beams_are_returned_with_padding(exact_server, oracle, prompt, end_id, pad_id):
    expected = of_transformers(oracle, prompt, end_id, num_beams=4, num_return_sequences=3)
    assert len({len(tokens) for tokens in expected}) > 1
    answer = completion(
        exact_server.grpc,
        input_ids=list(prompt),
        request_output_len=NUM_TOKENS,
        end_id=end_id,
        pad_id=pad_id,
        beam_width=4,
        len_penalty=1.0,
        num_return_sequences=3,
    )
    longest = max(map(len, expected))
    assert answer.outputs["output_ids"].tolist() == [
        [tokens + [pad_id] * (longest - len(tokens)) for tokens in expected]
    ]
    assert answer.outputs["sequence_length"].tolist() == [[len(tokens) for tokens in expected]]
    reasons = [b"LENGTH" if len(tokens) == NUM_TOKENS else b"END_ID" for tokens in expected]
    assert answer.outputs["finish_reason"].tolist() == [reasons]
    assert answer.outputs["text_output"].shape == (3,)


@pytest.mark.covers("beam_search_diversity_rate", "generation_logits", "top_log_prob_ids")
@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_the_diversity_rate_reaches_the_search(fake_server, rate):
    sampling = SamplingConfig(beam_width=3, length_penalty=1.0, beam_search_diversity_rate=rate)
    output = OutputOptions(return_log_probs=True, num_top_log_probs=2, return_generation_logits=True)
    expected = expected_beams(
        Request(1, PLAIN, 4, sampling=sampling, output=output), FAKE_VOCABULARY, attend_to_all=False
    )
    answer = completion(
        fake_server.grpc,
        input_ids=list(PLAIN),
        request_output_len=4,
        beam_width=3,
        len_penalty=1.0,
        beam_search_diversity_rate=rate,
        return_log_probs=True,
        num_top_log_probs=2,
        return_generation_logits=True,
    )
    assert answer.beams == [list(beam.token_ids) for beam in expected]
    np.testing.assert_allclose(
        answer.outputs["cum_log_probs"], [[beam.cum_log_prob for beam in expected]], rtol=1e-5
    )
    assert answer.outputs["top_log_prob_ids"][0].tolist() == [
        [list(top.token_ids) for top in beam.top_log_probs] for beam in expected
    ]
    assert answer.outputs["generation_logits"].shape == (1, 3, 4, FAKE_VOCABULARY)


@pytest.mark.covers("streaming")
def test_each_response_of_streamed_beams_has_all_tokens(fake_server):
    """Each response has the beams of a search that would end then."""
    request = Request(1, PLAIN, 8, sampling=SamplingConfig(beam_width=3))
    steps = expected_beam_steps(request, FAKE_VOCABULARY, attend_to_all=False)
    possible = [[list(beam.token_ids) for beam in step] for step in steps]

    def streamed() -> list[Answer]:
        answers = ask(
            fake_server.grpc, input_ids=list(PLAIN), request_output_len=8, beam_width=3, streaming=True
        )
        assert answers[-1].beams == possible[-1]
        assert all(answer.beams in possible for answer in answers)
        assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]
        return answers

    wait_for_several(streamed)


def test_beams_and_streams_do_not_affect_each_other(fake_server, oracle):
    """Different widths and samplers share iterations, and none waits for the others to end."""
    alone = [
        completion(fake_server.grpc, input_ids=list(PLAIN), request_output_len=12, beam_width=width).beams
        for width in (1, 2, 5)
    ]
    results = [
        infer(
            fake_server.http,
            input_ids=np.array([PLAIN] * 3, np.int32),
            request_output_len=np.array([[12]] * 3, np.int32),
            beam_width=np.array([[1], [2], [5]], np.int32),
            exclude_input_in_output=np.array([[True]] * 3),
        )
        for _ in range(2)
    ]
    for result in results:
        ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        assert ids.shape == (3, 5, 12)
        rows = [
            [beam[:length].tolist() for beam, length in zip(ids[i], lengths[i]) if length] for i in range(3)
        ]
        assert rows == alone


def test_a_stop_string_ends_the_text_of_beams(exact_server, tokenizer, prompt):
    request = {"text_input": PROMPT, "request_output_len": NUM_TOKENS, "beam_width": 3, "end_id": -1}
    plain = completion(exact_server.grpc, **request)
    texts = [text.decode() for text in plain.outputs["text_output"]]
    stop = texts[0][3:6]
    stopped = completion(exact_server.grpc, stop_words=[stop], **request)
    assert not any(stop in text.decode() for text in stopped.outputs["text_output"])
    assert "STOP_WORDS" in {reason.decode() for reason in stopped.outputs["finish_reason"][0]}
