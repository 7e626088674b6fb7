"""From a Result to tensors: exactly what was requested, in shapes with the batch of one in front."""

from __future__ import annotations

import pytest

from inflight.core.stop import FinishReason
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
from inflight.testing.fake_pb_utils import FakePbUtils, TritonError
from inflight.triton.responses import ResponseBuilder
from tests.triton.factories import make_options, make_result

BUILDER = ResponseBuilder(FakePbUtils())


def test_values_and_shapes() -> None:
    options = make_options(return_num_input_tokens=True, return_num_output_tokens=True)
    arrays = BUILDER.outputs(make_result([8, 9], FinishReason.LENGTH), options, "téxt").arrays()
    assert arrays["output_ids"].tolist() == [[[8, 9]]]
    assert arrays["sequence_length"].tolist() == [[2]]
    assert arrays["finish_reason"].tolist() == [[b"LENGTH"]]
    assert arrays["text_output"].tolist() == [["téxt".encode()]]
    assert arrays["num_input_tokens"].tolist() == [[3]]
    assert arrays["num_output_tokens"].tolist() == [[2]]


def test_no_tokens_is_still_an_output() -> None:
    arrays = BUILDER.outputs(make_result([], FinishReason.CANCELLED), make_options(), None).arrays()
    assert arrays["output_ids"].shape == (1, 1, 0)
    assert arrays["sequence_length"].tolist() == [[0]]
    assert arrays["finish_reason"].tolist() == [[b"CANCELLED"]]


def test_counts_need_their_flags() -> None:
    assert not {"num_input_tokens", "num_output_tokens"} & set(
        BUILDER.outputs(make_result(), make_options(), None).arrays()
    )


@pytest.mark.parametrize("name", ["output_ids", "sequence_length", "finish_reason", "text_output"])
def test_only_what_was_requested(name: str) -> None:
    options = make_options(requested_outputs=frozenset({name}))
    assert set(BUILDER.outputs(make_result(), options, "text").arrays()) == {name}


def test_text_needs_text() -> None:
    assert "text_output" not in BUILDER.outputs(make_result(), make_options(), None).arrays()
    assert "text_output" in BUILDER.outputs(make_result(), make_options(), "").arrays()


def test_empty() -> None:
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
