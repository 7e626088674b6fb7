"""Requests whose bans leave no token, or with extreme parameter values: other requests are unaffected."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from inflight.core.request.request import ExternalDraft, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.errors import InvalidArgument
from tests.engine.kernels import DEFAULT, TORCH
from tests.engine.paging import MAX_SEQUENCE_LENGTH, load_paged
from tests.engine.serving import Served, config_of, load, serve
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.sampling.factories import floats
from tests.sampling.test_extremes import extreme_request
from tests.tiers import with_all

NEVER = float("-inf")
EVERY_TOKEN = tuple(range(VOCAB_SIZE))
BANS: dict[str, dict[str, Any]] = {
    "bad_words_list": {"bad_words": tuple((token,) for token in EVERY_TOKEN)},
    "embedding_bias": {"embedding_bias": floats([NEVER] * VOCAB_SIZE)},
    "min_length and allowed_token_ids": {
        "end_ids": (7,),
        "sampling": {"allowed_token_ids": (7,), "min_length": 2},
    },
    "logit_bias_values": {
        "sampling": {"logit_bias_ids": EVERY_TOKEN, "logit_bias_values": (NEVER,) * VOCAB_SIZE}
    },
    "min_length and bad_words_list": {
        "end_ids": EVERY_TOKEN[:20],
        "bad_words": tuple((token,) for token in EVERY_TOKEN[20:]),
        "sampling": {"min_length": 3},
    },
    "bad_words_list and no_repeat_ngram_size": {
        "bad_words": tuple((token,) for token in EVERY_TOKEN[5:]),
        "sampling": {"no_repeat_ngram_size": 1},
    },
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "all": {"top_p": 1.0, "temperature": 2.0},
    "beams": {"beam_width": 3},
}

one_kernel = pytest.mark.parametrize("kernels", with_all([DEFAULT, TORCH], [None]))
"""Tokens are chosen from logits, whatever computed them."""


def impossible(model: ZooModel, number: int, ban: str, sampling: str, **fields: Any) -> Request:
    """Return a request whose bad words and no_repeat_ngram_size together ban all tokens."""
    asked = {**SAMPLINGS[sampling], **BANS[ban].get("sampling", {})}
    others = {name: value for name, value in BANS[ban].items() if name != "sampling"}
    prompt = (*range(5), *model.prompt(9, number))
    return Request(number, prompt, 8, sampling=SamplingConfig(**asked), **others, **fields)


def ordinary_requests(model: ZooModel) -> list[Request]:
    samplings = (SamplingConfig(), SamplingConfig(top_p=0.9, random_seed=3), SamplingConfig(beam_width=2))
    return [
        Request(100 + number, model.prompt(12, number), 10, sampling=samplings[number % 3], bad_words=((7,),))
        for number in range(6)
    ]


def answers(served: Served, requests: list[Request]) -> list[list[list[int]]]:
    return [served.beams(request) for request in requests]


@one_kernel
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_requests_whose_bans_leave_no_token_fail_alone(zoo: Zoo, sampling: str, kernels: str | None) -> None:
    model, others = zoo["llama-gqa"], ordinary_requests(zoo["llama-gqa"])
    faulty = dict(enumerate(BANS))
    requests = [impossible(model, number, ban, sampling) for number, ban in faulty.items()]
    mixed = [each for pair in zip(requests, others) for each in pair] + others[len(requests) :]
    engine = load(model.folder, 60, 8, kernels=kernels)
    alone = serve(engine, config_of("no-evict"), others)
    together = serve(engine, config_of("no-evict"), mixed, may_fail=faulty)
    assert answers(together, others) == answers(alone, others)
    for number, ban in faulty.items():
        error = together.errors[number]
        assert type(error) is InvalidArgument
        assert str(error).startswith(f"{ban} must leave a token that may come next, got every token banned")
        assert str(error).endswith("after 0 generated")
        assert (number, 0) not in together.responses


@one_kernel
@pytest.mark.parametrize("with_logits", [False, True])
@pytest.mark.parametrize("sampling", ["greedy", "top_p"])
def test_drafts_do_not_hide_that_no_token_is_left(
    zoo: Zoo, sampling: str, with_logits: bool, kernels: str | None
) -> None:
    """Each of a few tokens is allowed once: a draft that contains some of them bans the rest at once."""
    model = zoo["llama-gqa"]
    logits = floats([[0.0] * VOCAB_SIZE] * 3) if with_logits else None
    request = replace(
        impossible(model, 0, "bad_words_list and no_repeat_ngram_size", sampling, streaming=True),
        input_token_ids=(*range(2), *model.prompt(9)),
        draft=ExternalDraft((2, 3, 4), logits, 0.0 if with_logits else None),
    )
    lookup = replace(request, request_id=1, draft=None, prompt_lookup_num_tokens=4)
    served = serve(
        load(model.folder, 60, kernels=kernels), config_of("no-evict"), [request, lookup], may_fail=(0, 1)
    )
    allowed = {2, 3, 4} - set(request.input_token_ids)
    for number in (0, 1):
        assert type(served.errors[number]) is InvalidArgument
        streamed = [
            token for response in served.responses[number, 0] for token in response.result.output_token_ids[0]
        ]
        assert sorted(streamed) == sorted(allowed)
        assert str(served.errors[number]).endswith(f"after {len(allowed)} generated")


@pytest.mark.parametrize("kernels", [DEFAULT, TORCH])
def test_extreme_requests_fail_no_iteration(zoo: Zoo, kernels: str | None) -> None:
    """Every parameter at its limits; the request is answered or ends with its own error, without side effects."""
    model, others, numbers = zoo["llama-gqa"], ordinary_requests(zoo["llama-gqa"]), random.Random(5)
    requests = []
    for number in range(90):
        width, lookup = ((1, 0), (1, 4), (3, 0))[number % 3]
        extreme = extreme_request(numbers, VOCAB_SIZE, beam_width=width)
        tokens = extreme.input_token_ids[:20]
        requests.append(
            replace(
                extreme,
                request_id=number,
                input_token_ids=tokens,
                max_new_tokens=6,
                prompt_lookup_num_tokens=lookup,
            )
        )
    mixed = [each for pair in zip(requests, others * 15) for each in pair][: 2 * len(others)]
    mixed += requests[len(others) :]
    engine = load(model.folder, 60, 8, kernels=kernels)
    alone = serve(engine, config_of("no-evict"), others)
    together = serve(engine, config_of("no-evict"), mixed, may_fail=range(90))
    assert answers(together, others) == answers(alone, others)
    assert all(type(error) is InvalidArgument for error in together.errors.values())
    assert all((number, 0) in together.responses or number in together.errors for number in range(90))
    assert 15 < len(together.errors) < 60


def test_overlapped_iterations_notice_that_no_token_is_left(zoo: Zoo) -> None:
    """The second batch is in flight when the first one's result is that no token is possible."""
    model = zoo["llama-gqa"]
    engine = load_paged(model.folder)
    engine.limits = replace(engine.limits, overlaps_iterations=True)
    faulty = impossible(model, 0, "bad_words_list", "top_k")
    other = Request(1, model.prompt(9), 12)
    served = serve(engine, config_of("no-evict"), [faulty, other], may_fail=(0,))
    assert served.most_in_flight == 2
    assert type(served.errors[0]) is InvalidArgument
    assert served.tokens(1) == model.greedy(model.prompt(9), 12)
    assert other.max_sequence_length < MAX_SEQUENCE_LENGTH
