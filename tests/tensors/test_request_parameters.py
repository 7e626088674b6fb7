"""Request parameters beside tensors: every parameter, and an error that names it for every invalid value."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inflight.core.request.request import Request
from inflight.errors import InvalidArgument, Name, TooLong, Unsupported
from inflight.tensors.request_parameters import (
    HARMLESS,
    NO_PARAMETERS,
    RequestParameters,
    error_writer,
    read_request_parameters,
)
from inflight.tensors.requests import convert
from inflight.tensors.spec import Vocabulary
from inflight.tensors.wanted_outputs import Naming
from tests.tensors.factories import ALL_OUTPUTS, make_context, make_rows, token_inputs

LARGEST = 2**63 - 1


def read(timeout_us: int = 0, **parameters: object) -> RequestParameters:
    return read_request_parameters(json.dumps(parameters), timeout_us, Vocabulary.TOKENS)


@pytest.mark.parametrize("text", ["", "{}", '{"Streaming": true, "model": "m", "priority": 3}'])
def test_a_request_without_parameters_reads_none(text: str) -> None:
    """Triton's own priority is ignored: it has a meaning for Triton only."""
    assert read_request_parameters(text, 0, Vocabulary.TEXT) == NO_PARAMETERS


@pytest.mark.parametrize("name", [*HARMLESS, "triton_enable_empty_final_response"])
@pytest.mark.parametrize("vocabulary", Vocabulary)
def test_harmless_parameters_of_known_clients_are_accepted(name: str, vocabulary: Vocabulary) -> None:
    assert read_request_parameters(json.dumps({name: True}), 0, vocabulary) == NO_PARAMETERS


@pytest.mark.parametrize(
    ("vocabulary", "name", "hint"),
    [
        (Vocabulary.TEXT, "temprature", "did you mean temperature?"),
        (Vocabulary.TEXT, "allotted_time", "did you mean allotted_time_ms?"),
        (Vocabulary.TEXT, "xyzzy", "leave it out"),
        (Vocabulary.TEXT, "prompt", "did you mean text_input?"),
        (Vocabulary.TEXT, "stop_sequences", "did you mean stop_words?"),
        (Vocabulary.TEXT, "max_completion_tokens", "did you mean max_tokens?"),
        (Vocabulary.TEXT, "stop_token_ids", "did you mean end_ids?"),
        (Vocabulary.TEXT, "structured_outputs", "did you mean guided_decoding_guide_type?"),
        (Vocabulary.TOKENS, "input_id", "did you mean input_ids?"),
        (Vocabulary.TOKENS, "image_input", "this model does not take it"),
        (Vocabulary.TEXT, "decoder_input_ids", "this model does not take it"),
        (Vocabulary.TEXT, "temperature", "it is an input, send it as a tensor"),
    ],
)
def test_unknown_parameters_are_refused_by_name(vocabulary: Vocabulary, name: str, hint: str) -> None:
    """HTTP generate turns an unknown key into a parameter, so this is a misspelt input."""
    with pytest.raises(InvalidArgument) as raised:
        read_request_parameters(json.dumps({name: "7"}), 0, vocabulary)
    assert name in str(raised.value) and str(raised.value).endswith(hint)


def test_parameters_configured_as_ignored_are_ignored() -> None:
    text = '{"x-request-id": "5", "top_p": 1}'
    with pytest.raises(InvalidArgument, match="x-request-id"):
        read_request_parameters(text, 0, Vocabulary.TEXT, ("top_p",))
    ignored = ("x-request-id", "top_p")
    assert read_request_parameters(text, 0, Vocabulary.TOKENS, ignored) == NO_PARAMETERS


@pytest.mark.parametrize("kind", ["", "context_and_generation"])
def test_a_request_for_both_phases_is_an_ordinary_one(kind: str) -> None:
    assert read(triton_trtllm_request_type=kind) == NO_PARAMETERS


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_a_request_for_the_context_or_generation_phase_alone_is_refused(kind: str) -> None:
    with pytest.raises(Unsupported, match=f"triton_trtllm_request_type is not available .*got '{kind}'"):
        read(triton_trtllm_request_type=kind)


@pytest.mark.parametrize("value", [0.75, "0.75"])
def test_a_priority_may_be_a_number_or_a_text(value: object) -> None:
    assert read(request_priority=value) == RequestParameters(priority=0.75)


def test_a_priority_parameter_equals_a_tensor_of_the_same_value() -> None:
    assert read(request_priority=0.7).priority == float(np.float32(0.7))


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), (7, 7), (7.0, 7), ("7", 7), (str(2**64 - 1), 2**64 - 1)]
)
def test_a_client_id_is_read(value: object, expected: int) -> None:
    assert read(client_id=value) == RequestParameters(client_id=expected)


@pytest.mark.parametrize(
    ("timeout_us", "parameters", "allotted_time_ms"),
    [
        (0, {"allotted_time_ms": 5}, 5),
        (0, {"allotted_time_ms": "5"}, 5),
        (2_000_000, {}, 2000),
        (1, {}, 1),
        (1001, {}, 2),
        (LARGEST, {}, -(-LARGEST // 1000)),
        (0, {"timeout": 3000}, 3),
        (5000, {"timeout": 3000}, 5),
        (5000, {"allotted_time_ms": 7}, 7),
        (5000, {"allotted_time_ms": 0}, 0),
        (0, {"timeout": 0}, None),
    ],
)
def test_allotted_time_ms_overrides_the_timeout_in_microseconds(
    timeout_us: int, parameters: dict[str, object], allotted_time_ms: int | None
) -> None:
    assert read(timeout_us, **parameters) == RequestParameters(allotted_time_ms=allotted_time_ms)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_priority", -0.1),
        ("request_priority", "1.5"),
        ("request_priority", "high"),
        ("request_priority", float("nan")),
        ("request_priority", True),
        ("request_priority", [0.5]),
        ("client_id", -1),
        ("client_id", 2**64),
        ("client_id", "me"),
        ("client_id", 1.5),
        ("client_id", False),
        ("client_id", {}),
        ("allotted_time_ms", -1),
        ("allotted_time_ms", "1 s"),
        ("timeout", -3),
        ("timeout", "soon"),
    ],
)
def test_the_error_of_a_bad_value_names_the_parameter(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"^request parameter {name} must be a.* in \\[0, .*got "):
        read(**{name: value})


@pytest.mark.parametrize(
    ("value", "end_ids"), [("2", (2,)), ("128001,128008, 128009", (128001, 128008, 128009)), ("", ())]
)
def test_several_end_ids_are_separated_by_commas(value: str, end_ids: tuple[int, ...]) -> None:
    assert read(end_ids=value).end_ids == end_ids


@pytest.mark.parametrize("value", [[1, 2], 7, "1;2", "1,,2", "two", True])
def test_invalid_end_ids_are_refused_by_name(value: object) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^request parameter end_ids must be a string of token ids, .*got "
    ):
        read(end_ids=value)


def test_a_parameter_puts_the_code_before_an_error() -> None:
    error = TooLong(Name("end_id"), " is {12}")
    assert error_writer('{"error_codes": true}')(error) == "INVALID_ARG: end_id is {12}"
    assert error_writer('{"structured_errors": true}')(error) == "TOO_LONG: {end_id} is {{12}}"
    for text in ("", "{}", '{"error_codes": false}', '{"client_id": "error_codes"}'):
        assert error_writer(text)(error) == "end_id is {12}"
    with pytest.raises(
        InvalidArgument, match=r"request parameter error_codes must be true or false, got 'yes'"
    ):
        read(error_codes="yes")
    with pytest.raises(InvalidArgument, match=r"structured_errors must be true or false, got 1"):
        read(structured_errors=1)


def test_large_integers_sent_as_floats_are_refused() -> None:
    """Triton's JSON has no integers beyond 2**63; the nearest float may be another client's id."""
    with pytest.raises(InvalidArgument, match=r"client_id .*got 9\.2\d+e\+18; a string can hold"):
        read(client_id=float(2**63))


def test_an_error_shows_a_negative_timeout_as_sent() -> None:
    with pytest.raises(InvalidArgument, match=r"timeout must be .*, got -5$"):
        read(timeout_us=2**64 - 5)


def converted(parameters: RequestParameters, **tensors: object) -> list[Request]:
    naming = Naming.from_triton(ALL_OUTPUTS, Vocabulary.TOKENS)
    prompts = convert(make_rows(token_inputs(**tensors)), make_context(naming=naming, parameters=parameters))
    return [prompt.request for prompt in prompts]


READ_VALUES = RequestParameters(priority=0.25, client_id=7, allotted_time_ms=900)


def test_parameters_replace_absent_tensors() -> None:
    (request,) = converted(READ_VALUES)
    assert (request.priority, request.client_id, request.allotted_time_ms) == (0.25, 7, 900)


def test_a_tensor_overrides_a_parameter() -> None:
    (request,) = converted(READ_VALUES, priority=0.0, client_id=0, allotted_time_ms=0)
    assert (request.priority, request.client_id, request.allotted_time_ms) == (0.0, 0, 0)


def test_the_end_ids_parameter_replaces_the_default_and_not_the_tensor() -> None:
    several = RequestParameters(end_ids=(3, 4))
    assert converted(several)[0].end_ids == (3, 4)
    assert converted(several, end_id=5)[0].end_ids == (5,)
    assert converted(several, end_id=-1)[0].end_ids == ()
    assert converted(RequestParameters(end_ids=()))[0].end_ids == ()
    with pytest.raises(InvalidArgument, match="end_id must be a token id in"):
        converted(RequestParameters(end_ids=(3, 10**6)))


def test_parameters_apply_to_every_row_of_a_batch() -> None:
    rows = {"input_ids": [[1], [2]], "request_output_len": np.array([4, 4], np.int32)}
    requests = converted(READ_VALUES, priority=np.array([0.5, 1.0], np.float32), **rows)
    assert [(r.priority, r.client_id) for r in requests] == [(0.5, 7), (1.0, 7)]
