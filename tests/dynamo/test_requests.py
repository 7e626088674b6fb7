"""Requests of Dynamo's frontend become requests of the engine, or are refused by the name of a field."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.core.kv.block_keys import PrefixIdentity, id_of_text
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.dynamo.requests import read_request
from inflight.errors import InvalidArgument, RequestError, TooLong, Unsupported
from tests.endpoint.factories import DESCRIPTION

SEEDED = {"seed": 5}


def frontends_request(**groups: Any) -> dict[str, Any]:
    """Return a request as the frontend of Dynamo 1.6.1 sends it, with the given options in its groups."""
    stops = ("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
    sampling = (
        "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
        "top_k", "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output",
        "guided_decoding",
    )  # fmt: skip
    outputs = (
        "logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids",
    )  # fmt: skip
    names = {
        "stop_conditions": (*stops, "min_tokens", "ignore_eos", "max_thinking_tokens"),
        "sampling_options": sampling,
        "output_options": outputs,
    }
    asked: dict[str, Any] = {
        "model": "demo",
        "token_ids": [5, 6, 7],
        "eos_token_ids": [2],
        "mdc_sum": "92df8e49",
        "annotations": [],
        "routing": {"dp_rank": 0},
        "router_config_override": None,
        **{group: dict.fromkeys(options) for group, options in names.items()},
    }
    asked["stop_conditions"]["stop_token_ids_hidden"] = [2]
    for name, value in groups.items():
        asked[name] = {**asked.get(name, {}), **value} if isinstance(value, dict) else value
    return asked


def read(**groups: Any) -> Request:
    return read_request(frontends_request(**groups), DESCRIPTION, "the-id")


def test_a_request_without_options_has_openais_defaults_and_all_the_tokens_that_fit() -> None:
    request = read(sampling_options=SEEDED)
    assert request == Request(
        0,
        (5, 6, 7),
        253,
        streaming=True,
        end_ids=(2,),
        sampling=SamplingConfig(top_p=1.0, random_seed=5),
        output=OutputOptions(exclude_input_from_output=True, return_perf_metrics=True),
    )
    assert request.origin is not None
    assert (request.origin.front, request.origin.request_id, request.origin.model) == (
        "dynamo",
        "the-id",
        "demo",
    )


def test_every_sampling_option_arrives() -> None:
    options = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": 0.75, "frequency_penalty": -0.5, "seed": -1, "n": 1, "best_of": 1,
        "use_beam_search": False,
    }  # fmt: skip
    request = read(
        sampling_options=options,
        stop_conditions={"max_tokens": 8, "min_tokens": 3, "stop": ["x"]},
        output_options={"logprobs": 4, "skip_special_tokens": True},
        routing={"cache_salt": "abc", "priority": 1, "expected_output_tokens": 7},
        extra_args={
            "nvext": {"cache_salt": "abc"},
            "sampling_options": {"allowed_token_ids": [7, 8], "bad_words_token_ids": [[1], [2, 3]]},
        },
    )
    assert request.sampling == SamplingConfig(
        temperature=0.5,
        top_p=0.25,
        top_k=9,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.75,
        frequency_penalty=-0.5,
        random_seed=2**64 - 1,
        min_length=3,
        allowed_token_ids=(7, 8),
    )
    assert (request.max_new_tokens, request.bad_words) == (8, ((1,), (2, 3)))
    assert (request.output.return_log_probs, request.output.num_top_log_probs) == (True, 4)
    assert (request.identity, request.priority) == (PrefixIdentity(id_of_text("abc")), 0.75)


def test_log_probs_may_be_wanted_without_alternatives() -> None:
    output = read(output_options={"logprobs": 0}).output
    assert (output.return_log_probs, output.num_top_log_probs) == (True, 0)


@pytest.mark.parametrize(
    ("options", "greedy", "top_k"),
    [({"top_k": -1, "temperature": 0.0}, 0.0, 0), ({"top_p": 0.0, "top_k": 3}, 0.0, 3), ({}, 1.0, 0)],
)
def test_options_that_mean_no_limit_or_greedy(options: dict[str, Any], greedy: float, top_k: int) -> None:
    sampling = read(sampling_options=options).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (greedy, top_k, 1.0)


def test_requests_without_a_seed_differ() -> None:
    assert read().sampling.random_seed != read().sampling.random_seed


@pytest.mark.parametrize(
    ("stops", "sampling", "outputs", "end_ids", "stop_words"),
    [
        ({"stop_token_ids": [9]}, {}, {}, (2, 9), ()),
        ({"stop_token_ids": [9], "ignore_eos": True}, {}, {}, (9,), ()),
        ({"stop_token_ids_visible": [2]}, {}, {}, (), ((2,),)),
        ({"stop_token_ids": [9]}, {"include_stop_str_in_output": True}, {}, (2,), ((9,),)),
        ({"stop_token_ids": [9]}, {}, {"no_stop_trim": True}, (), ((2,), (9,))),
    ],
)
def test_stop_ids_are_returned_only_if_wanted(
    stops: dict[str, Any],
    sampling: dict[str, Any],
    outputs: dict[str, Any],
    end_ids: tuple[int, ...],
    stop_words: tuple[tuple[int, ...], ...],
) -> None:
    stops = {**stops, "min_tokens": 2}
    request = read(stop_conditions=stops, sampling_options=sampling, output_options=outputs)
    assert (request.end_ids, request.stop_words, request.stop_words_after) == (end_ids, stop_words, 2)


@pytest.mark.parametrize(
    ("options", "guide"),
    [
        ({"json": {"type": "object"}}, Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')),
        ({"json": '{"type": "array"}', "choice": []}, Guide(GuideKind.JSON_SCHEMA, '{"type": "array"}')),
        ({"regex": "a+"}, Guide(GuideKind.REGEX, "a+")),
        ({"grammar": 'root ::= "a"'}, Guide(GuideKind.EBNF_GRAMMAR, 'root ::= "a"')),
        ({"choice": ["yes", 'n"e']}, Guide(GuideKind.EBNF_GRAMMAR, r'root ::= "yes" | "n\x22" "e"')),
        ({"structural_tag": {"triggers": []}}, Guide(GuideKind.STRUCTURAL_TAG, '{"triggers": []}')),
    ],
)
def test_guided_decoding_becomes_a_guide(options: dict[str, Any], guide: Guide) -> None:
    assert read(sampling_options={"guided_decoding": options}).guide == guide


@pytest.mark.parametrize(
    ("groups", "kind", "message"),
    [
        ({"sampling_options": {"n": 2}}, Unsupported, "n must be 1, got 2"),
        ({"sampling_options": {"best_of": 3}}, Unsupported, "best_of must be 1, got 3"),
        ({"sampling_options": {"use_beam_search": True}}, Unsupported, "use_beam_search is not supported"),
        ({"sampling_options": {"length_penalty": 0.0}}, Unsupported, "length_penalty is not supported"),
        ({"sampling_options": {"later_option": 1}}, Unsupported, "later_option is not supported"),
        ({"sampling_options": {"top_k": -5, "min_p": 2.0}}, InvalidArgument, "min_p must be in"),
        (
            {"stop_conditions": {"max_thinking_tokens": 9}},
            Unsupported,
            "max_thinking_tokens is not supported",
        ),
        ({"stop_conditions": {"max_tokens": 254}}, TooLong, "max_tokens is 254"),
        ({"stop_conditions": {"max_tokens": 0}}, InvalidArgument, "max_tokens must be at least 1"),
        (
            {"stop_conditions": {"stop_token_ids": [5000]}},
            InvalidArgument,
            "stop_token_ids must be a token id in",
        ),
        ({"output_options": {"prompt_logprobs": 0}}, Unsupported, "prompt_logprobs is not supported"),
        ({"output_options": {"logprobs": 2000}}, InvalidArgument, "logprobs must be in"),
        ({"token_ids": [5000]}, InvalidArgument, "prompt must be in"),
        ({"token_ids": list(range(300))}, TooLong, "prompt has 300 tokens"),
        ({"token_ids": []}, InvalidArgument, "prompt is empty"),
        ({"multi_modal_data": {"image_url": []}}, Unsupported, "multi_modal_data is not supported"),
        ({"prefill_result": {"a": 1}}, Unsupported, "prefill_result is not supported"),
        ({"routing": {"lora_name": "sql"}}, Unsupported, "lora_name: this worker serves no LoRA adapters"),
        ({"extra_args": {"vllm_tito": {"a": 1}}}, Unsupported, "extra_args.vllm_tito is not supported"),
        (
            {"extra_args": {"sampling_options": {"detokenize": True}}},
            Unsupported,
            "detokenize is not supported",
        ),
        (
            {"extra_args": {"sampling_options": {"bad_words_token_ids": [[5000]]}}},
            InvalidArgument,
            "bad_words_token_ids must be in",
        ),
    ],
)
def test_options_that_change_tokens_and_are_not_served_are_refused_by_name(
    groups: dict[str, Any], kind: type[RequestError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read(**groups)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"json": {}, "regex": "a"},
            InvalidArgument,
            "guided_decoding has json and regex, expected only one",
        ),
        ({"json": {}, "whitespace_pattern": " "}, Unsupported, "guided_decoding.whitespace_pattern"),
        ({"regex": "a", "backend": "xgrammar"}, Unsupported, "guided_decoding.backend"),
        ({"choice": ["a", ""]}, InvalidArgument, "guided_decoding.choice has an empty text"),
        ({"regex": ""}, InvalidArgument, "guided_decoding is required"),
    ],
)
def test_guides_that_are_not_served_are_refused_by_name(
    options: dict[str, Any], kind: type[RequestError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read(sampling_options={"guided_decoding": options})


def test_a_guide_cannot_begin_after_the_reasoning() -> None:
    with pytest.raises(Unsupported, match="guided_decoding cannot be used with a reasoning parser"):
        read(sampling_options={"guided_decoding": {"regex": "a"}}, require_reasoning=True)
    assert read(require_reasoning=True).guide is None
