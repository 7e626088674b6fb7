"""Shapes, types and aliases: what is read, and what is said when it cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.errors import InvalidArgument, Unsupported
from inflight.triton.tensor_reader import decode_utf8
from inflight.triton.tensor_spec import Vocabulary
from tests.triton.factories import make_reader


@pytest.mark.parametrize("shape", [[], [1], [1, 1], [1, 1, 1]])
def test_a_scalar_may_come_in_any_shape_with_one_element(shape: list[int]) -> None:
    assert make_reader({"end_id": np.full(shape, 7, np.int32)}).integer("end_id") == 7


@pytest.mark.parametrize("shape", [[0], [1, 0]])
def test_an_empty_tensor_is_absent(shape: list[int]) -> None:
    reader = make_reader({"end_id": np.zeros(shape, np.int32), "input_ids": np.zeros(shape, np.int32)})
    assert reader.integer("end_id") is None
    assert reader.array("input_ids") is None


@pytest.mark.parametrize("byte", [1, 2, 0x80, 0xFF])
def test_any_byte_but_zero_is_true(byte: int) -> None:
    raw = np.array([byte], np.uint8).view(np.bool_)
    assert make_reader({"streaming": raw}).boolean("streaming") is True
    with pytest.raises(Unsupported, match="return_log_probs"):
        make_reader({"return_log_probs": raw}).refuse_unbuilt()


def test_a_seed_keeps_its_64_bits() -> None:
    assert make_reader({"random_seed": np.array([2**64 - 1], np.uint64)}).integer("random_seed") == 2**64 - 1


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("input_ids", [3], [3]),
        ("input_ids", [1, 3], [3]),
        ("stop_words_list", [2, 3], [2, 3]),
        ("stop_words_list", [1, 2, 3], [2, 3]),
    ],
)
def test_an_array_may_come_with_or_without_the_batch_dimension(
    name: str, shape: list[int], expected: list[int]
) -> None:
    array = make_reader({name: np.zeros(shape, np.int32)}).array(name)
    assert array is not None and list(array.shape) == expected


def test_a_batch_is_refused_with_advice() -> None:
    with pytest.raises(Unsupported, match=r"input_ids has shape \[2, 3\].*Send 2 separate requests"):
        make_reader({"input_ids": np.zeros([2, 3], np.int32)}).array("input_ids")
    with pytest.raises(Unsupported, match=r"end_id has shape \[4\].*Send 4 separate requests"):
        make_reader({"end_id": np.zeros([4], np.int32)}).integer("end_id")


def test_a_wrong_rank_names_shape_and_expectation() -> None:
    with pytest.raises(InvalidArgument, match=r"input_ids must have shape \[1, n\], got \[1, 1, 3\]"):
        make_reader({"input_ids": np.zeros([1, 1, 3], np.int32)}).array("input_ids")
    with pytest.raises(InvalidArgument, match=r"stop_words_list must have shape \[1, 2, n\], got \[3, 2\]"):
        make_reader({"stop_words_list": np.zeros([3, 2], np.int32)}).array("stop_words_list")


def test_a_wrong_type_names_both() -> None:
    with pytest.raises(InvalidArgument, match="end_id must be INT32, got int64"):
        make_reader({"end_id": np.array([1], np.int64)}).integer("end_id")


def test_an_alias_is_the_same_tensor() -> None:
    assert make_reader({"seed": np.array([5], np.uint64)}).integer("random_seed") == 5


def test_both_names_must_agree() -> None:
    five, six = np.array([5], np.uint64), np.array([6], np.uint64)
    assert make_reader({"seed": five, "random_seed": five}).integer("random_seed") == 5
    with pytest.raises(InvalidArgument, match="seed is 6 but random_seed is 5: they are two names"):
        make_reader({"seed": six, "random_seed": five}).integer("random_seed")


def test_a_refusal_says_what_came_and_what_would_do() -> None:
    with pytest.raises(Unsupported, match=r"beam_width .*got 4; leave it out or send 1$"):
        make_reader({"beam_width": np.array([4], np.int32)}).refuse_unbuilt()
    words = np.array([[[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]], np.int32)
    with pytest.raises(
        Unsupported, match=r"bad_words_list .*\[1, 2, 5\] \[5, 7, 3, 9, …\]; .*\[\[0\], \[-1\]\]$"
    ):
        make_reader({"bad_words_list": words}).refuse_unbuilt()
    with pytest.raises(Unsupported, match=r"stop_words .*got 'end'"):
        make_reader({"stop_words": np.array([b"end"], np.object_)}).refuse_unbuilt()


def test_text_must_be_utf8() -> None:
    assert decode_utf8("ü".encode(), "text_input") == "ü"
    with pytest.raises(
        InvalidArgument, match="text_input must be UTF-8 text; byte 0xff at position 2 is not"
    ):
        decode_utf8(b"ab\xff", "text_input")


def test_messages_use_the_names_of_the_client() -> None:
    message = "request_output_len is 9, runtime_top_p is 2, random_seed"
    tokens = make_reader({"seed": np.array([5], np.uint64)})
    assert tokens.in_client_names(message) == "request_output_len is 9, runtime_top_p is 2, seed"
    text = make_reader({}, Vocabulary.TEXT)
    assert text.in_client_names(message) == "max_tokens is 9, top_p is 2, seed"
