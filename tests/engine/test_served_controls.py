"""Penalties, bans and bias through the whole batcher, compared with transformers' logits processors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.sampling import reference
from tests.engine.kernels import DEFAULT, TORCH
from tests.engine.serving import config_of, load, serve
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

every_case = pytest.mark.parametrize(
    "case", with_all(["llama-gqa", "mistral-window", "gpt2"], ["mistral-window"])
)
"""Controls see a family's logits alone; by default one family's, with windows."""
NUM_TOKENS = 30
WAYS = ["no-evict", "utilization-chunked-no-reuse"]


def prompt_of(model: ZooModel, number: int, seed: int = 0) -> tuple[int, ...]:
    """Return a prompt; half of the prompts share a prefix, and each repeats some of its tokens."""
    own = model.prompt(4 + 3 * number, number + 100 * seed)
    return (*(model.prompt(17) if number % 2 else ()), *own, *own[:4])


def bias() -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 4


def make_request(
    number: int, prompt: tuple[int, ...], sampling: dict[str, Any] | None = None, **changes: Any
) -> Request:
    return Request(number, prompt, NUM_TOKENS, sampling=SamplingConfig(**(sampling or {})), **changes)


# name: our settings, transformers' settings
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"sampling": {"repetition_penalty": 1.4}}, {"repetition_penalty": 1.4}),
    "encouraged repetition": ({"sampling": {"repetition_penalty": 0.8}}, {"repetition_penalty": 0.8}),
    "no repeated token": ({"sampling": {"no_repeat_ngram_size": 1}}, {"no_repeat_ngram_size": 1}),
    "no repeated bigram": (
        {"sampling": {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2}},
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2},
    ),
    "no repeated trigram": (
        {"sampling": {"repetition_penalty": 0.6, "no_repeat_ngram_size": 3}},
        {"repetition_penalty": 0.6, "no_repeat_ngram_size": 3},
    ),
    "bias": (
        {"embedding_bias": FloatTensor((VOCAB_SIZE,), bias().numpy().tobytes())},
        {"sequence_bias": [[[token], value] for token, value in enumerate(bias().tolist())]},
    ),
}


def first_changed(model: ZooModel, number: int, options: dict[str, Any]) -> tuple[tuple[int, ...], list[int]]:
    """Return a prompt after which the last of `options` makes a difference, and the resulting tokens."""
    without = dict(list(options.items())[:-1])
    for seed in range(10):
        prompt = prompt_of(model, number, seed)
        tokens = model.generate(prompt, NUM_TOKENS, **options)
        if tokens != model.generate(prompt, NUM_TOKENS, **without):
            return prompt, tokens
    raise AssertionError(f"{options} change nothing")


@cache
def processed(model: ZooModel) -> tuple[list[Request], list[list[int]]]:
    """Return a request for each of PROCESSORS, and its result."""
    requests, expected = [], []
    for number, (changes, options) in enumerate(PROCESSORS.values()):
        prompt, tokens = first_changed(model, number, options)
        requests.append(make_request(number, prompt, **changes))
        expected.append(tokens)
    return requests, expected


@every_case
@pytest.mark.parametrize("way", with_all(WAYS, ["utilization-chunked-no-reuse"]))
def test_greedy_tokens_with_every_processor_in_one_batch_are_those_of_transformers(
    zoo: Zoo, case: str, way: str
) -> None:
    model = zoo[case]
    requests, expected = processed(model)
    served = serve(load(model.folder, 34, 5), config_of(way), requests)
    got = {name: served.tokens(request) for name, request in zip(PROCESSORS, requests, strict=True)}
    assert got == dict(zip(PROCESSORS, expected, strict=True))


@cache
def banned(model: ZooModel) -> tuple[list[Request], list[list[int]]]:
    """Return requests that ban tokens which they would generate otherwise, and their results."""
    requests, expected = [], []
    for number in range(4):
        prompt = prompt_of(model, number)
        plain = model.generate(prompt, NUM_TOKENS)
        end_id = next(token for token in plain[5 + number :] if token != plain[0])
        words = ((plain[0],), tuple(plain[2:4]), (prompt[-1], plain[1]), tuple(plain[7:10]))
        sampling, options = {"min_length": 12}, {"min_new_tokens": 12}
        if number % 2:
            sampling, options = {"min_length": 20}, {"min_new_tokens": 20}
            options["bad_words_ids"] = [list(word) for word in words]
        else:
            words = ()
        requests.append(make_request(number, prompt, sampling, end_ids=(end_id,), bad_words=words))
        tokens = model.generate(prompt, NUM_TOKENS, end_id=end_id, **options)
        expected.append(tokens[:-1] if tokens[-1] == end_id else tokens)
        assert len(expected[-1]) >= options["min_new_tokens"]
        assert expected[-1] != plain
    return requests, expected


@every_case
@pytest.mark.parametrize("way", WAYS)
def test_tokens_with_min_length_and_bad_words_are_those_of_transformers(
    zoo: Zoo, case: str, way: str
) -> None:
    model = zoo[case]
    requests, expected = banned(model)
    served = serve(load(model.folder, 34, 5), config_of(way), requests)
    assert [served.tokens(request) for request in requests] == expected


def penalized(model: ZooModel, request: Request) -> list[int]:
    """Return greedy tokens with presence and frequency penalties, which transformers lacks."""
    tokens = list(request.input_token_ids)
    for _ in range(request.max_new_tokens):
        counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE)
        logits = model.logits(tokens)[-1] - request.sampling.frequency_penalty * counts
        tokens.append(int((logits - request.sampling.presence_penalty * (counts > 0)).argmax()))
    return tokens[request.prompt_length :]


@every_case
def test_presence_and_frequency_penalties_give_the_expected_greedy_tokens(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    requests = [
        make_request(number, prompt_of(model, number), sampling)
        for number, sampling in enumerate(
            (
                {"presence_penalty": 6.0},
                {"frequency_penalty": 3.0},
                {"presence_penalty": -3.0, "frequency_penalty": 2.0},
            )
        )
    ]
    expected = [penalized(model, request) for request in requests]
    for request, tokens in zip(requests, expected, strict=True):
        assert tokens != model.generate(request.input_token_ids, NUM_TOKENS)
    served = serve(load(model.folder, 34, 5), config_of("utilization"), requests)
    assert [served.tokens(request) for request in requests] == expected


CONTROLLED: list[dict[str, Any]] = [
    {"allowed_token_ids": tuple(range(3, VOCAB_SIZE, 5))},
    {"allowed_token_ids": (5, 9, 14, 60), "top_p": 0.9},
    {"logit_bias_ids": (5, 9, 5), "logit_bias_values": (2.0, 4.0, 1.0)},
    {"logit_bias_ids": (7, 8), "logit_bias_values": (-math.inf, 3.0), "top_k": 5, "temperature": 0.7},
    {
        "allowed_token_ids": tuple(range(40)),
        "logit_bias_ids": (9, 50),
        "logit_bias_values": (3.0, 90.0),
        "repetition_penalty": 1.3,
        "min_p": 0.02,
    },
]


def referenced(model: ZooModel, request: Request) -> list[int]:
    """Choose tokens by `sampling.reference`, one at a time from transformers' logits, without an end id."""
    tokens = list(request.input_token_ids)
    while len(tokens) < request.max_sequence_length:
        token = reference.next_token(model.logits(tokens)[-1].tolist(), request, tokens)
        if token in request.end_ids:
            break
        tokens.append(token)
    return tokens[request.prompt_length :]


@cache
def controlled(model: ZooModel) -> dict[Request, list[int]]:
    """Return a request for each of CONTROLLED, and its result."""
    requests = [
        make_request(number, prompt_of(model, number), {**sampling, "random_seed": number}, end_ids=(9,))
        for number, sampling in enumerate(CONTROLLED)
    ]
    return {request: referenced(model, request) for request in requests}


@pytest.mark.parametrize("kernels", [DEFAULT, TORCH])
@every_case
def test_allowed_tokens_and_logit_biases_give_the_references_tokens(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    """Tokens equal those of `sampling.reference`, with and without prompt lookup."""
    model = zoo[case]
    expected = controlled(model)
    requests = list(expected)
    guessing = [
        replace(request, request_id=10 + number, prompt_lookup_num_tokens=3)
        for number, request in enumerate(requests)
    ]
    served = serve(load(model.folder, 60, 6, kernels=kernels), config_of("utilization"), requests + guessing)
    for request, guess in zip(requests, guessing, strict=True):
        assert served.tokens(request) == served.tokens(guess) == expected[request]
        allowed = request.sampling.allowed_token_ids
        assert not allowed or set(served.tokens(request)) <= set(allowed) - set(request.end_ids)


EVERYTHING = {
    "temperature": 1.2,
    "top_k": 30,
    "top_p": 0.95,
    "top_p_decay": 0.97,
    "top_p_min": 0.5,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "min_length": 8,
    "no_repeat_ngram_size": 2,
    "random_seed": 11,
}


def sampling_requests(model: ZooModel) -> list[Request]:
    """Return requests with all controls on, and a few that only sample."""
    requests = []
    for number in range(8):
        prompt, sampling = prompt_of(model, number), {**EVERYTHING, "random_seed": number}
        if number % 4 == 3:
            sampling = {"temperature": 1.0, "top_p": 1.0, "random_seed": number}
        words = ((5,), (prompt[-1], 8), (7, 7))
        requests.append(make_request(number, prompt, sampling, end_ids=(9,), bad_words=words))
    return requests


@every_case
def test_sampled_tokens_are_those_of_the_reference(zoo: Zoo, case: str) -> None:
    """With all controls at once, tokens equal those of `sampling.reference` on transformers' logits."""
    model = zoo[case]
    requests = sampling_requests(model)[1:4]
    served = serve(load(model.folder, 34, 5), config_of("utilization-chunked-no-reuse"), requests)
    for request in requests:
        assert served.tokens(request) == referenced(model, request)


@every_case
def test_tokens_do_not_depend_on_other_requests(zoo: Zoo, case: str) -> None:
    """A request gets the same tokens alone, in a batch, paused, chunked, with and without shared blocks."""
    model = zoo[case]
    requests = sampling_requests(model)
    engine = load(model.folder, 200)
    alone = [serve(engine, config_of("no-evict"), [request]).tokens(request) for request in requests]
    pauses = 0
    for way in ("utilization", "chunked", "utilization-chunked-no-reuse"):
        served = serve(load(model.folder, 26, 5), config_of(way), requests)
        assert [served.tokens(request) for request in requests] == alone
        pauses += served.num_pauses
    assert pauses > 0
