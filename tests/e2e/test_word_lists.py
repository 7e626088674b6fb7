"""Word lists in requests: this server's errors for invalid ones, and Triton's own errors."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.testing.fake_model import expected_tokens

from .clients import ask, completion, word_list
from .conftest import FAKE_VOCABULARY

PROMPT = [5, 6, 7, 8, 9]
NAMES = ["stop_words_list", "bad_words_list"]
LAYOUT = "[[5,7,3,9,2],[3,5,-1,-1,-1]] for the words [5,7,3] and [9,2]"


def alone(count: int) -> list[int]:
    return expected_tokens(PROMPT, count, FAKE_VOCABULARY, attend_to_all=False)


def refusal(server, **tensors: np.ndarray) -> str:
    (answer,) = ask(server.grpc, input_ids=PROMPT, request_output_len=4, **tensors)
    assert answer.error is not None and answer.final
    return str(answer.error)


@pytest.mark.covers("stop_words_list")
def test_one_of_several_stop_words_ends_the_output(fake_server):
    tokens = alone(12)
    words = word_list([tokens[7], tokens[7]], [tokens[4], tokens[5], tokens[6]], [999, 999])
    answer = completion(fake_server.grpc, input_ids=PROMPT, request_output_len=12, stop_words_list=words)
    assert answer.ids == tokens[:7] and answer.finish_reason == "STOP_WORDS"


@pytest.mark.parametrize("name", NAMES)
def test_nvidias_empty_list_has_no_words(fake_server, name):
    empty = np.array([[[0], [-1]]], np.int32)
    answer = completion(fake_server.grpc, input_ids=PROMPT, request_output_len=4, **{name: empty})
    assert answer.ids == alone(4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[5, 7], [3, -1]], "has the end offset 3, but 2 ids"),
        ([[5, 7], [2, 1]], "has an end offset 1 after 2: they must grow, [2, 1]"),
        ([[5, 7], [0, 2]], "has an end offset 0 after 0"),
        ([[5, 7], [-1, 2]], "has an end offset after -1"),
    ],
    ids=lambda part: "",
)
def test_an_invalid_word_list_is_refused_with_the_layout(fake_server, name, rows, problem):
    message = refusal(fake_server, **{name: np.array([rows], np.int32)})
    assert f"{name} {problem}" in message and LAYOUT in message


MIXED_UP = "batch size does not match other inputs for 'tensorrt_llm'"
WRONG_TYPE = "but model 'tensorrt_llm' expects 'INT32'"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([[5, 7], [1, 2]], np.int32), MIXED_UP),
        (np.array([5, 7], np.int32), MIXED_UP),
        (np.array([[5, 7]], np.int32), "Expected [-1,2,-1], got [1,2]"),
        (np.array([[[5, 7], [1, 2], [0, 0]]], np.int32), "Expected [-1,2,-1], got [1,3,2]"),
        (np.array([[[5, 7], [1, 2]]], np.int64), f"data-type is 'INT64', {WRONG_TYPE}"),
        (np.array([[[5, 7], [1, 2]]], np.float32), f"data-type is 'FP32', {WRONG_TYPE}"),
    ],
    ids=["[2, n]", "[n]", "[1, n]", "three rows", "INT64", "FP32"],
)
def test_wrong_shapes_are_refused_with_tritons_message(fake_server, name, array, said):
    """To Triton, a missing batch dimension looks like a batch of two; docs/tensors.md says so."""
    message = refusal(fake_server, **{name: array})
    assert said in message
    assert said == MIXED_UP or name in message
