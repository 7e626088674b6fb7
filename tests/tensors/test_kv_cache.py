"""Retention and salt: required combinations of tensors, and an error that names a missing one."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument
from inflight.tensors.requests import convert
from inflight.tensors.spec import Vocabulary
from inflight.tensors.wanted_outputs import Naming
from tests.tensors.factories import ALL_OUTPUTS, make_context, make_rows, token_inputs


def requests_of(**tensors: object) -> list[Request]:
    naming = Naming.from_triton(ALL_OUTPUTS, Vocabulary.TOKENS)
    prompts = convert(make_rows(token_inputs(**tensors)), make_context(naming=naming))
    return [prompt.request for prompt in prompts]


def ranges(**parts: list[list[int]]) -> dict[str, list[list[int]]]:
    return {f"retention_token_range_{name}": values for name, values in parts.items()}


def test_a_request_without_the_tensors_has_default_retention_and_identity() -> None:
    (request,) = requests_of()
    assert (request.retention, request.identity) == (RetentionConfig(), PrefixIdentity())


def test_durations_of_retention_may_be_left_out() -> None:
    (request,) = requests_of(**ranges(starts=[[0]], ends=[[2]], priorities=[[90]]))
    assert request.retention.ranges == (TokenRangeRetention(0, 2, Retention(90, None)),)


def test_empty_arrays_mean_no_retention_ranges() -> None:
    (request,) = requests_of(**ranges(starts=[[]], ends=[[]], priorities=[[]], durations_ms=[[]]))
    assert request.retention == RetentionConfig()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"starts": [[0, 2]], "ends": [[2]], "priorities": [[1, 2]]},
            "Invalid retention_token_range_ends length. Expected length 2, as retention_token_range_starts has, "
            "got length 1",
        ),
        (
            {"starts": [[0]], "ends": [[2]], "priorities": [[1, 2]]},
            "Invalid retention_token_range_priorities length. Expected length 1, ",
        ),
        (
            {"starts": [[0]], "ends": [[2]], "priorities": [[1]], "durations_ms": [[1, 2, 3]]},
            "Invalid retention_token_range_durations_ms length. Expected length 1, ",
        ),
        (
            {"starts": [[0]], "priorities": [[1]]},
            "retention_token_range_ends must be provided: retention_token_range_starts has 1 ranges",
        ),
        ({"starts": [[0]], "ends": [[1]]}, "retention_token_range_priorities must be provided"),
        (
            {"durations_ms": [[1]]},
            "retention_token_range_starts must be provided: retention_token_range_durations_ms came without it",
        ),
        ({"starts": [[0]], "ends": [[2]], "priorities": [[101]]}, "priorities must be in [0, 100], got 101"),
        ({"starts": [[0]], "ends": [[-2]], "priorities": [[1]]}, "ends must be greater than their starts"),
        (
            {"starts": [[0, 1]], "ends": [[-1, 3]], "priorities": [[1, 2]]},
            "retention token ranges must not overlap, got [0, -1) and one that starts at 1",
        ),
        (
            {"starts": [[0]], "ends": [[2]], "priorities": [[1]], "durations_ms": [[0]]},
            "retention_token_range_durations_ms must be >= 1 (-1: for ever), got 0",
        ),
    ],
)
def test_invalid_retention_tensors_are_refused_by_name(
    parts: dict[str, list[list[int]]], message: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        requests_of(**ranges(**parts))
    assert message in str(raised.value)


def test_every_row_of_a_batch_has_its_own_salt_and_retention() -> None:
    first, second = requests_of(
        input_ids=[[1, 2], [3, 4]],
        request_output_len=np.array([4, 4], np.int32),
        cache_salt_id=np.array([7, 8], np.uint64),
        retention_decode_priority=np.array([60, 70], np.int32),
        **ranges(starts=[[0], [1]], ends=[[1], [-1]], priorities=[[10], [20]], durations_ms=[[-1], [500]]),
    )
    assert (first.identity.cache_salt_id, second.identity.cache_salt_id) == (7, 8)
    assert first.retention == RetentionConfig(
        (TokenRangeRetention(0, 1, Retention(10, None)),), Retention(60, None)
    )
    assert second.retention == RetentionConfig(
        (TokenRangeRetention(1, None, Retention(20, 500)),), Retention(70, None)
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"priority": 1.5}, r"priority must be in \[0, 1\], got 1.5"),
        ({"priority": float("nan")}, r"priority must be in \[0, 1\], got nan"),
        ({"allotted_time_ms": -1}, "allotted_time_ms must be >= 0"),
        ({"retention_decode_priority": 101}, r"retention_decode_priority must be in \[0, 100\], got 101"),
    ],
)
def test_values_out_of_range_are_refused_by_name(tensors: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        requests_of(**tensors)
