"""From tensors to a Request: defaults, corners, and an error that names the tensor for everything else."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.core.request import Request
from inflight.errors import InflightError, InvalidArgument, Unsupported
from inflight.triton.requests import FrontEndOptions, ServingContext, convert
from inflight.triton.tensor_spec import Vocabulary
from tests.triton.factories import (
    ALL_OUTPUTS,
    make_context,
    make_description,
    make_reader,
    text_inputs,
    token_inputs,
)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def convert_tokens(
    context: ServingContext | None = None, outputs: frozenset[str] = ALL_OUTPUTS, **tensors: object
) -> tuple[Request, FrontEndOptions]:
    return convert(make_reader(token_inputs(**tensors)), outputs, context or make_context(), encode)


def convert_text(context: ServingContext | None = None, **tensors: object) -> tuple[Request, FrontEndOptions]:
    reader = make_reader(text_inputs(**tensors), Vocabulary.TEXT)
    return convert(reader, frozenset({"text_output"}), context or make_context(), encode)


def test_defaults_are_the_specifications() -> None:
    request, options = convert_tokens()
    assert request == Request(0, (5, 6, 7), 4)
    assert not options.streaming and options.include_prompt


@pytest.mark.parametrize(
    ("by_text", "end_id", "expected"),
    [
        (False, None, (9,)),
        (False, -1, ()),
        (False, 4, (4,)),
        (True, None, (2, 3)),
        (True, -1, ()),
        (True, 4, (4,)),
    ],
)
def test_end_ids(by_text: bool, end_id: int | None, expected: tuple[int, ...]) -> None:
    context = make_context(description=make_description(default_end_ids=(9,)))
    prompt = {"input_ids": None, "text_input": b"hi"} if by_text else {}
    assert convert_tokens(context, end_id=end_id, **prompt)[0].end_ids == expected


@pytest.mark.parametrize("top_p", [0.0, -1.0])
def test_top_p_up_to_zero_is_unset(top_p: float) -> None:
    assert convert_tokens(runtime_top_p=top_p)[0].sampling.top_p == 0.0


def test_pad_id_of_minus_one_is_none() -> None:
    assert convert_tokens(pad_id=-1)[0].pad_id is None


def test_nobody_wants_the_prompts_ids_back() -> None:
    request, options = convert_tokens(outputs=frozenset({"text_output"}))
    assert request.output.exclude_input_from_output
    assert options.include_prompt


@pytest.mark.parametrize("default", [True, False])
def test_exclude_input_follows_the_parameter_and_then_the_request(default: bool) -> None:
    context = make_context(exclude_input_in_output=default)
    assert convert_tokens(context)[0].output.exclude_input_from_output is default
    request, options = convert_tokens(context, exclude_input_in_output=not default)
    assert request.output.exclude_input_from_output is not default
    assert options.include_prompt is default


def test_streamed_text_never_starts_with_the_prompt() -> None:
    assert not convert_text(stream=True)[1].include_prompt


# (what is sent, the class of the refusal, what it says)
REFUSED: list[tuple[dict[str, object], type[InflightError], str]] = [
    (
        {"input_ids": None},
        InvalidArgument,
        "a value is required for input_ids, or text_input: it is missing or",
    ),
    ({"input_ids": np.zeros([1, 0], np.int32)}, InvalidArgument, "a value is required for input_ids"),
    (
        {"request_output_len": None},
        InvalidArgument,
        "a value is required for request_output_len: it is missing",
    ),
    ({"text_input": b"hi"}, InvalidArgument, "both input_ids and text_input"),
    ({"input_ids": None, "text_input": b"hi", "input_lengths": 2}, InvalidArgument, "input_lengths is 2"),
    (
        {"input_lengths": 4},
        InvalidArgument,
        "input_lengths must be from 1 to 3, the length of input_ids, got 4",
    ),
    ({"input_lengths": 0}, InvalidArgument, "input_lengths must be from 1 to 3"),
    ({"request_output_len": 0}, InvalidArgument, "request_output_len must be at least 1, got 0"),
    ({"request_output_len": 62}, InvalidArgument, "request_output_len is 62, but after 3 prompt tokens"),
    ({"input_ids": [[5, 1000]]}, InvalidArgument, r"input_ids must be in \[0, 999\], got 1000 at position 1"),
    ({"input_ids": [[-1]]}, InvalidArgument, r"input_ids must be in \[0, 999\], got -1 at position 0"),
    ({"input_ids": [list(range(61))]}, InvalidArgument, "input_ids has 61 tokens"),
    ({"input_ids": [[1, 2], [3, 4]]}, Unsupported, r"input_ids has shape \[2, 2\].*Send 2 separate requests"),
    ({"request_output_len": [4, 4]}, Unsupported, r"request_output_len has shape \[2\].*Send 2 separate"),
    ({"end_id": 1000}, InvalidArgument, r"end_id must be in \[-1, 999\]"),
    ({"end_id": -2}, InvalidArgument, r"end_id must be in \[-1, 999\].*got -2"),
    ({"pad_id": -2}, InvalidArgument, "pad_id must be >= -1"),
    ({"temperature": float("nan")}, InvalidArgument, "temperature must be a finite number >= 0, got nan"),
    ({"temperature": -1.0}, InvalidArgument, "temperature must be"),
    ({"runtime_top_k": -1}, InvalidArgument, "runtime_top_k must be >= 0"),
    ({"runtime_top_p": 1.5}, InvalidArgument, r"runtime_top_p must be in \(0, 1\].*got 1.5"),
    ({"runtime_top_p": float("nan")}, InvalidArgument, "runtime_top_p must be"),
    ({"beam_width": 2}, Unsupported, "beam_width is not available"),
    ({"input_ids": None, "text_input": b"\xff"}, InvalidArgument, "text_input must be UTF-8"),
    ({"seed": 1, "random_seed": 2}, InvalidArgument, "seed is 1 but random_seed is 2"),
]


@pytest.mark.parametrize(("tensors", "error", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_refusals(tensors: dict[str, object], error: type[InflightError], message: str) -> None:
    with pytest.raises(error, match=message):
        convert_tokens(**tensors)


REFUSED_TEXT: list[tuple[dict[str, object], str]] = [
    ({"text_input": None}, "a value is required for text_input: it is missing or empty"),
    ({"text_input": b""}, "text_input is empty"),
    ({"text_input": b"x" * 61}, "text_input has 61 tokens"),
    ({"max_tokens": None}, "a value is required for max_tokens"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"top_k": -1}, "^top_k must be >= 0"),
    ({"top_p": 1.5}, "^top_p must be in"),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED_TEXT, ids=lambda part: str(part)[:40])
def test_refusals_in_the_words_of_ensemble(tensors: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert_text(**tensors)


def test_streaming_needs_a_decoupled_model() -> None:
    with pytest.raises(InvalidArgument, match=r"streaming is true, but this model gives one response.*_llm"):
        convert_tokens(make_context(decoupled=False), streaming=True)
    with pytest.raises(InvalidArgument, match=r"^stream is true"):
        convert_text(make_context(decoupled=False), stream=True)


def test_no_tokenizer_is_the_encoders_refusal() -> None:
    def refuse(text: str) -> list[int]:
        raise Unsupported("no tokenizer")

    with pytest.raises(Unsupported, match="no tokenizer"):
        convert(make_reader(text_inputs(), Vocabulary.TEXT), ALL_OUTPUTS, make_context(), refuse)
