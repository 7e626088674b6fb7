"""Conversion of bodies to requests, for values that answers do not show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument
from inflight.openai.errors import ApiError
from inflight.openai.protocol import ChatBody, CompletionBody
from inflight.openai.sampling import BodySettings, choose_seed, make_prompt
from inflight.text.text_encoder import TextEncoder
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.serving import DEMO

LIMITS = ModelLimits(
    vocab_size=3072,
    max_sequence_length=256,
    max_input_length=255,
    num_blocks=32,
    tokens_per_block=16,
    max_beam_width=4,
)
DESCRIPTION = EngineDescription(LIMITS, eos_token_ids=(0,))


def request_of(
    body: dict[str, Any],
    limits: ModelLimits = LIMITS,
    length: int = 9,
    max_tokens: int | None = 16,
    **asked: Any,
) -> Request:
    parsed = CompletionBody.model_validate({"prompt": "x", **body})
    tokenizer = Tokenizer.from_dir(DEMO)
    description = replace(DESCRIPTION, limits=limits)
    whole = BodySettings(parsed, max_tokens, seed=choose_seed(parsed), **asked)
    return make_prompt(whole, [5] * length, None, description, TextEncoder(lambda: tokenizer)).request


def test_vllms_lower_priority_starts_first() -> None:
    asked = [-1000, -3, 0, 1, 2, 10_000]
    told = [request_of({"priority": each}).priority for each in asked]
    assert told == sorted(told, reverse=True) and len(set(told)) == len(asked)
    assert told[2] == Request(0, (1,), 1).priority


def test_users_and_salts_get_distinct_numbers() -> None:
    first, second, nobody = (request_of(body) for body in ({"user": "a"}, {"safety_identifier": "b"}, {}))
    assert first.client_id != second.client_id and nobody.client_id == 0
    salts = {request_of({"cache_salt": salt}).identity.cache_salt_id for salt in ("a", "b")}
    assert len(salts) == 2 and request_of({}).identity.cache_salt_id == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_return_sequences": 1}),
        ({"top_p": 0}, {"temperature": 0.0, "top_p": 1.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"random_seed": (1 << 64) - 1}),
        ({"min_tokens": 3, "no_repeat_ngram_size": 2}, {"min_length": 3, "no_repeat_ngram_size": 2}),
        ({"logit_bias": {"7": -5, "8": 1.5}}, {"logit_bias_ids": (7, 8), "logit_bias_values": (-5.0, 1.5)}),
        ({"use_beam_search": True, "n": 3}, {"beam_width": 3, "length_penalty": 1.0, "early_stopping": 0}),
        ({"use_beam_search": True, "n": 2, "early_stopping": "never"}, {"early_stopping": 2}),
        ({"use_beam_search": True}, {"beam_width": 1, "temperature": 0.0}),
        (
            {"presence_penalty": 1, "frequency_penalty": 2},
            {"presence_penalty": 1.0, "frequency_penalty": 2.0},
        ),
    ],
)
def test_sampling_fields_are_converted(body: dict[str, Any], expected: dict[str, Any]) -> None:
    sampling = request_of(body).sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_stop_tokens_and_stop_strings_reach_the_request() -> None:
    assert request_of({"stop_token_ids": [7, 0]}).end_ids == (0, 7)
    assert request_of({"stop_token_ids": [7], "ignore_eos": True}).end_ids == (7,)
    beams = {"stop": "ab", "n": 2, "use_beam_search": True}
    assert request_of(beams).stop_words and request_of(beams).stop_words_after == 0
    held_back = request_of({**beams, "min_tokens": 4})
    assert held_back.stop_words and held_back.stop_words_after == held_back.sampling.min_length == 4
    assert request_of({"stop": "ab"}).streaming and not request_of({}).streaming


def test_perf_metrics_are_requested_only_if_usage_is_returned() -> None:
    options = {"include_usage": True}
    assert request_of({}).output.return_perf_metrics
    assert not request_of({"stream": True}).output.return_perf_metrics
    assert request_of({"stream": True, "stream_options": options}).output.return_perf_metrics


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 200, 255])
@pytest.mark.parametrize("num_blocks", [4, 9, 16, 64])
def test_without_max_tokens_the_most_tokens_the_engine_accepts_are_requested(
    width: int, length: int, num_blocks: int
) -> None:
    limits = replace(LIMITS, num_blocks=num_blocks)
    room = limits.room(length, width)
    body = {"n": width, "use_beam_search": True}

    def is_taken(max_tokens: int) -> bool:
        request = replace(request_of(body), input_token_ids=(5,) * length, max_new_tokens=max_tokens)
        try:
            request.validate(limits)
        except InvalidArgument:
            return False
        return True

    assert not is_taken(room + 1)
    if room:
        assert is_taken(room)
        assert request_of(body, limits, length, max_tokens=None).max_new_tokens == room
    else:
        with pytest.raises(ApiError, match="takes at most 256 tokens"):
            request_of(body, limits, length, max_tokens=None)


def test_prompt_logits_are_bounded() -> None:
    huge = replace(
        LIMITS, vocab_size=200_000, max_sequence_length=4096, max_input_length=4095, num_blocks=1024
    )
    with pytest.raises(ApiError, match=r"logprobs is 5: .* MiB"):
        request_of({"logprobs": 5, "echo": True}, huge, 2000, num_top=5, num_prompt_top=5, echo=True)
    assert request_of({"logprobs": 0, "echo": True}, huge, 2000, num_top=0, num_prompt_top=0, echo=True)


def test_null_fields_count_as_left_out() -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user"}], "n": None, "stop": None, "tools": None})
    assert (body.n, body.stop_strings, body.tools) == (1, (), [])
