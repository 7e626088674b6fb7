"""Beam search through the whole batcher: the same tokens as transformers' `generate` finds."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from inflight.core.request.beam_search import BeamCandidates, BeamSearch
from inflight.core.request.request import FloatTensor, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.sampling import reference
from tests.engine.serving import Served, config_of, load, serve, to_torch
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import examples, with_all

CASES = ["llama-gqa", "mistral-window", "gpt2"]
every_case = pytest.mark.parametrize("case", with_all(CASES, ["llama-gqa"]))
"""The beams of each family are tested in test_beams.py; by default one family goes through the whole batcher."""
NUM_TOKENS = 14
GRID = list(
    itertools.product((2, 3, 5, 8), (0.0, 1.0, 2.0), (0, 1, 2))
)  # beams, length penalty, early stopping
EARLY_STOPPING = {0: False, 1: True, 2: "never"}
SLOTS = 20


@cache
def end_id_of(model: ZooModel, prompt: tuple[int, ...]) -> int:
    """Return a token that ends some beams: most beams of a wide search have it in the middle, none earlier."""
    found = model.beams(prompt, NUM_TOKENS, num_beams=8, num_return_sequences=8)
    early = {token for tokens, _ in found for token in tokens[:4]}
    middle = [token for tokens, _ in found for token in set(tokens[4:10])]
    return max(sorted(set(middle) - early), key=middle.count)


def make_request(model: ZooModel, number: int, **changes: Any) -> Request:
    """Return a request of the grid with its own prompt; half of the prompts share a prefix."""
    width, length_penalty, early_stopping = GRID[number % len(GRID)]
    prompt = (*(model.prompt(17) if number % 2 else ()), *model.prompt(3 + number % 11, 50 + number))
    sampling = {
        "beam_width": width,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "num_return_sequences": None if number % 3 else 1 + number % width,
        **changes.pop("sampling", {}),
    }
    values = {"end_ids": (end_id_of(model, prompt),), "streaming": number % 5 == 0, **changes}
    return Request(number, prompt, NUM_TOKENS, sampling=SamplingConfig(**sampling), **values)


def expected_of(model: ZooModel, request: Request, **options: Any) -> list[list[int]]:
    """Return transformers' beams, without end ids and padding."""
    sampling = request.sampling
    found = model.beams(
        request.input_token_ids,
        request.max_new_tokens,
        end_id=request.end_ids[0],
        num_beams=sampling.beam_width,
        length_penalty=sampling.length_penalty,
        early_stopping=EARLY_STOPPING[sampling.early_stopping],
        num_return_sequences=sampling.num_outputs,
        **options,
    )
    return [
        list(itertools.takewhile(lambda token: token != request.end_ids[0], tokens)) for tokens, _ in found
    ]


@cache
def grid(model: ZooModel, case: str) -> list[tuple[Request, list[list[int]]]]:
    """Return requests and their results: with --all every point of GRID for the first family, fewer for others."""
    step = examples(5, all=1) if case == CASES[0] else 4
    requests = [make_request(model, number) for number in range(0, len(GRID), step)]
    return [(request, expected_of(model, request)) for request in requests]


def assert_same(served: Served, answers: list[tuple[Request, list[list[int]]]]) -> None:
    for request, expected in answers:
        assert served.beams(request) == expected, request.sampling


@every_case
def test_beams_are_those_of_transformers(zoo: Zoo, case: str) -> None:
    answers = grid(zoo[case], case)
    requests = [request for request, _ in answers]
    served = serve(load(zoo[case].folder, 300, SLOTS), config_of("no-evict"), requests)
    assert_same(served, answers)
    reasons = {reason for request in requests for reason in served.result(request).finish_reasons}
    assert reasons == {FinishReason.END_ID, FinishReason.LENGTH}


@cache
def sampling_requests_of(model: ZooModel) -> dict[Request, list[int]]:
    """Return sampling requests, and the tokens that each gets alone."""
    sampling = SamplingConfig(temperature=1.3, top_p=0.9, random_seed=4)
    requests = [
        Request(1000 + number, model.prompt(5 + 3 * number, number), 30, sampling=sampling)
        for number in range(6)
    ]
    engine = load(model.folder, 300, SLOTS)
    return {request: serve(engine, config_of("no-evict"), [request]).tokens(request) for request in requests}


@pytest.mark.parametrize(
    "way",
    with_all(["utilization", "chunked", "utilization-chunked-no-reuse"], ["utilization-chunked-no-reuse"]),
)
@every_case
def test_beams_beside_sampling_requests_are_those_of_transformers(zoo: Zoo, case: str, way: str) -> None:
    """The cache is so small that sampling requests are paused for each other, and searches wait."""
    answers = grid(zoo[case], case)[::2]
    sampling_requests = sampling_requests_of(zoo[case])
    requests = [
        request
        for pair in itertools.zip_longest(sampling_requests, dict(answers))
        for request in pair
        if request
    ]
    served = serve(load(zoo[case].folder, 34, SLOTS), config_of(way), requests, per_iteration=3)
    assert_same(served, answers)
    assert {request: served.tokens(request) for request in sampling_requests} == sampling_requests
    if "utilization" in way:
        assert served.num_pauses > 0


MASKS = {
    "min_length": ({"sampling": {"min_length": 10}}, {"min_new_tokens": 10}),
    "no_repeat_ngram": ({"sampling": {"no_repeat_ngram_size": 1}}, {"no_repeat_ngram_size": 1}),
    "no_repeat_bigram": ({"sampling": {"no_repeat_ngram_size": 2}}, {"no_repeat_ngram_size": 2}),
}


@every_case
@pytest.mark.parametrize("mask", with_all(MASKS, ["min_length", "no_repeat_bigram"]))
def test_beams_with_masked_tokens_are_those_of_transformers(zoo: Zoo, case: str, mask: str) -> None:
    """transformers masks log probs, and renormalizes them only on request; here, logits are masked."""
    model = zoo[case]
    changes, options = MASKS[mask]
    requests = [make_request(model, number, **changes) for number in (1, 11, 17, 30)]
    answers = [
        (request, expected_of(model, request, renormalize_logits=True, **options)) for request in requests
    ]
    assert answers != [(request, expected_of(model, request)) for request in requests], "nothing was masked"
    served = serve(load(model.folder, 300, SLOTS), config_of("chunked"), requests)
    assert_same(served, answers)


@every_case
def test_beams_with_bad_words_are_those_of_transformers(zoo: Zoo, case: str) -> None:
    """Words of one token and of several tokens, taken from beams without bad words."""
    model = zoo[case]
    answers = []
    for number in (1, 11, 17, 30):
        best = expected_of(model, make_request(model, number))[0]
        words = ((best[0],), tuple(best[2:4]), (model.prompt(3)[0], best[1]))
        request = make_request(model, number, bad_words=words)
        options = {"bad_words_ids": [list(word) for word in words]}
        answers.append((request, expected_of(model, request, renormalize_logits=True, **options)))
        assert answers[-1][1][0] != best
    served = serve(load(model.folder, 300, SLOTS), config_of("no-evict"), [request for request, _ in answers])
    assert_same(served, answers)


def searched(model: ZooModel, request: Request) -> list[list[int]]:
    """Return the result of a step-by-step search with transformers' logits, ranked by `sampling.reference`."""
    search = BeamSearch(request)
    beams = [list(request.input_token_ids)]
    while not search.done:
        rows = [model.logits(tokens)[-1].tolist() for tokens in beams]
        ranked = reference.beam_candidates(rows, request, beams, search.scores, search.num_candidates)
        search.advance(BeamCandidates(*zip(*ranked)))
        beams = [
            [*beams[parent], token] for parent, token in zip(search.parents, search.token_ids, strict=True)
        ]
    return [list(found.token_ids) for found in search.hypotheses()]


@every_case
def test_beams_with_penalties_temperature_and_bias_are_those_of_the_reference(zoo: Zoo, case: str) -> None:
    """transformers combines these with beams differently; the expected beams are the reference's."""
    model = zoo[case]
    bias = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2
    requests = [
        make_request(model, 13, sampling={"repetition_penalty": 1.3, "temperature": 0.7}),
        make_request(model, 16, sampling={"presence_penalty": 1.0, "frequency_penalty": 0.5}),
        make_request(
            model,
            20,
            sampling={"temperature": 1.5, "beam_search_diversity_rate": 0.3},
            embedding_bias=FloatTensor((VOCAB_SIZE,), bias.numpy().tobytes()),
        ),
    ]
    served = serve(load(model.folder, 300, SLOTS), config_of("chunked"), requests)
    assert_same(served, [(request, searched(model, request)) for request in requests])


def test_log_probs_and_logits_of_beams_are_the_models_own(zoo: Zoo) -> None:
    """Log probs and logits are the model's own, before the search's bans and penalties."""
    model = zoo["llama-gqa"]
    output = OutputOptions(
        return_log_probs=True,
        num_top_log_probs=3,
        return_generation_logits=True,
        return_prompt_log_probs=True,
        return_context_logits=True,
    )
    changes = {"output": output, "streaming": False}
    requests = [
        make_request(model, 4, **changes),
        make_request(model, 13, sampling={"no_repeat_ngram_size": 2, "temperature": 0.7}, **changes),
    ]
    served = serve(load(model.folder, 300, SLOTS), config_of("chunked"), requests)
    for request in requests:
        result, length = served.result(request), request.prompt_length
        context = model.logits(request.input_token_ids)
        torch.testing.assert_close(to_torch(result.context_logits), context, rtol=0, atol=1e-4)
        assert result.prompt_log_probs[0] == 0.0
        assert len(result.prompt_log_probs) == length
        for beam, tokens in enumerate(served.beams(request)):
            exact = model.logits([*request.input_token_ids, *tokens])[length - 1 : -1]
            logits = to_torch(result.generation_logits[beam])
            torch.testing.assert_close(logits, exact, rtol=0, atol=1e-4)
            log_probs = logits.log_softmax(dim=-1)
            chosen = log_probs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
            assert list(result.log_probs[beam]) == pytest.approx(chosen.tolist(), abs=1e-5)
            ended = result.finish_reasons[beam] is FinishReason.END_ID
            if request.sampling.temperature == 1.0 and not ended:  # otherwise the search sums other values
                assert result.cum_log_probs[beam] == pytest.approx(chosen.sum().item(), abs=1e-4)
            top = [list(values.token_ids) for values in result.top_log_probs[beam]]
            assert top == log_probs.topk(3).indices.tolist()


def test_streamed_beams_have_all_tokens_so_far(zoo: Zoo) -> None:
    model = zoo["gpt2"]
    request = make_request(model, 1, streaming=True)
    served = serve(load(model.folder, 300, SLOTS), config_of("no-evict"), [request])
    responses = served.responses[request.request_id, 0]
    assert all(response.result.is_cumulative for response in responses)
    assert len(responses) >= NUM_TOKENS // 2
    assert served.beams(request) == expected_of(model, request)
