"""A response has exactly the wanted tensors, in the table's types; errors have their codes."""

from __future__ import annotations

import pytest

from inflight.core.request.stop import FinishReason
from inflight.errors import (
    AlreadyExists,
    Cancelled,
    InflightError,
    InvalidArgument,
    NotFound,
    StepFailed,
    Unavailable,
    Unsupported,
)
from inflight.prompt import Output
from inflight.triton.responses import ResponseBuilder
from tests.tensors.factories import make_prompt, make_result
from tests.triton.fake_pb_utils import FakePbUtils, TritonError

BUILDER = ResponseBuilder(FakePbUtils())


def arrays_of(*names: str, texts: tuple[str, ...] | None = ("text",), **result: object) -> dict:
    prompt = make_prompt(frozenset(names)) if names else make_prompt()
    return BUILDER.make_response([Output(prompt, make_result(**result), texts)]).arrays()


def test_outputs_have_the_expected_values_and_shapes() -> None:
    arrays = arrays_of(ids=[8, 9], reason=FinishReason.LENGTH, texts=("téxt",))
    assert arrays["output_ids"].tolist() == [[[8, 9]]]
    assert arrays["sequence_length"].tolist() == [[2]]
    assert arrays["finish_reason"].tolist() == [[b"LENGTH"]]
    assert arrays["text_output"].tolist() == ["téxt".encode()]
    assert arrays["num_input_tokens"].tolist() == [[3]]
    assert arrays["num_output_tokens"].tolist() == [[2]]


def test_an_output_without_tokens_is_sent_empty() -> None:
    arrays = arrays_of(ids=[], reason=FinishReason.CANCELLED, texts=None)
    assert arrays["output_ids"].shape == (1, 1, 0)
    assert arrays["sequence_length"].tolist() == [[0]]
    assert arrays["finish_reason"].tolist() == [[b"CANCELLED"]]


@pytest.mark.parametrize("name", ["output_ids", "sequence_length", "finish_reason", "text_output"])
def test_only_requested_outputs_are_sent(name: str) -> None:
    assert set(arrays_of(name)) == {name}


def test_text_output_needs_a_tokenizer() -> None:
    assert "text_output" not in arrays_of(texts=None)
    assert "text_output" in arrays_of(texts=("",))


def test_an_output_requested_by_one_prompt_is_sent_for_the_whole_batch() -> None:
    plain = Output(make_prompt(frozenset({"output_ids"})), make_result(), None)
    curious = Output(
        make_prompt(frozenset({"output_ids", "cum_log_probs"})), make_result(cum_log_probs=(-1.5,)), None
    )
    arrays = BUILDER.make_response([plain, curious]).arrays()
    assert arrays["cum_log_probs"].tolist() == [[0.0], [-1.5]]


def test_an_empty_response_has_no_tensors_and_no_error() -> None:
    assert not BUILDER.empty().output_tensors() and not BUILDER.empty().has_error()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InflightError("x"), TritonError.INTERNAL),
        (InvalidArgument("x"), TritonError.INVALID_ARG),
        (Unsupported("x"), TritonError.UNSUPPORTED),
        (AlreadyExists("x"), TritonError.ALREADY_EXISTS),
        (NotFound("x"), TritonError.NOT_FOUND),
        (Unavailable("x"), TritonError.UNAVAILABLE),
        (Cancelled("x"), TritonError.CANCELLED),
        (StepFailed("x"), TritonError.INTERNAL),
    ],
)
def test_errors_carry_their_code(error: InflightError, code: int) -> None:
    sent = BUILDER.error(error).error()
    assert (sent.code(), sent.message()) == (code, "x")
