"""Validation: each refusal names the tensor, what came and what would fit."""

from __future__ import annotations

import pytest

from inflight.core.request import ModelLimits
from inflight.core.sampling_config import SamplingConfig
from inflight.errors import InvalidArgument, error_from_code

from .factories import make_request

LIMITS = ModelLimits(vocab_size=100, max_sequence_length=32, max_input_length=20, max_kv_tokens=24)


def test_a_request_that_fits_passes():
    make_request(prompt=20, new=5).validate(LIMITS)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request(prompt=()), ["input_ids", "empty"]),
        (make_request(new=0), ["request_output_len", "at least 1", "got 0"]),
        (make_request(prompt=(1, 100)), ["input_ids", "[0, 99]", "got 100", "position 1"]),
        (make_request(prompt=(1, -3)), ["input_ids", "got -3"]),
        (make_request(end_ids=(100,)), ["end_id", "got 100"]),
        (make_request(prompt=(1,) * 21), ["input_ids", "21 tokens", "at most 20"]),
        (make_request(prompt=(1,) * 20, new=13), ["request_output_len", "13", "at most 12"]),
        (make_request(prompt=(1,) * 20, new=6), ["request_output_len", "24", "at most 5"]),
        (make_request(sampling=SamplingConfig(temperature=-1)), ["temperature", "-1"]),
        (make_request(sampling=SamplingConfig(temperature=float("nan"))), ["temperature", "nan"]),
        (make_request(sampling=SamplingConfig(top_k=-1)), ["runtime_top_k", "-1"]),
        (make_request(sampling=SamplingConfig(top_p=1.5)), ["runtime_top_p", "1.5"]),
        (make_request(sampling=SamplingConfig(random_seed=2**64)), ["random_seed", "64"]),
    ],
)
def test_a_refusal_says_what_is_wrong(request_, words):
    with pytest.raises(InvalidArgument) as caught:
        request_.validate(LIMITS)
    for word in words:
        assert word in str(caught.value)


def test_errors_survive_a_process_boundary():
    error = error_from_code("INVALID_ARG", "why")
    assert isinstance(error, InvalidArgument) and str(error) == "why"
    assert error_from_code("no such code", "why").code == "INTERNAL"
