"""Shapes, types and aliases: what is read, and the errors for invalid tensors."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.tensors.reader import decode_utf8
from inflight.tensors.spec import Vocabulary
from tests.tensors.factories import make_reader


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


def test_a_batch_is_read_row_by_row() -> None:
    inputs = {
        "input_ids": np.array([[5, 6], [7, 8]], np.int32),
        "end_id": np.array([1, 2], np.int32),
        "stop_words_list": np.array([[[5], [1]], [[0], [-1]]], np.int32),
        "stop_words": np.array([[b"a", b"b"], [b"c", b""]], np.object_),
        "random_seed": np.zeros([2, 0], np.uint64),
    }
    first, second = make_reader(inputs).rows()
    assert [row.array("input_ids").tolist() for row in (first, second)] == [[5, 6], [7, 8]]
    assert (first.integer("end_id"), second.integer("end_id")) == (1, 2)
    assert second.array("stop_words_list").tolist() == [[0], [-1]]
    assert (first.texts("stop_words"), second.texts("stop_words")) == (["a", "b"], ["c", ""])
    assert second.integer("random_seed") is None


def test_scalars_of_a_batch_may_keep_their_second_dimension() -> None:
    rows = make_reader({"end_id": np.array([[1], [2]], np.int32)}).rows()
    assert [row.integer("end_id") for row in rows] == [1, 2]


def test_the_only_row_of_a_reader_is_the_reader_itself() -> None:
    reader = make_reader()
    assert reader.rows() == [reader]


def test_tensors_must_have_the_same_number_of_rows() -> None:
    inputs = {"input_ids": np.zeros([3, 4], np.int32), "end_id": np.array([1, 2], np.int32)}
    with pytest.raises(InvalidArgument, match="end_id has 2 rows and input_ids has 3"):
        make_reader(inputs).rows()
    with pytest.raises(InvalidArgument, match="end_id has 1 rows and input_ids has 3"):
        make_reader(inputs | {"end_id": np.array([1], np.int32)}).rows()


def test_texts_are_read_as_utf8_or_refused() -> None:
    reader = make_reader({"bad_words": np.array([["ü".encode(), b"x"]], np.object_)})
    assert reader.texts("bad_words") == ["ü", "x"]
    assert make_reader({}).texts("bad_words") == []
    with pytest.raises(InvalidArgument, match="bad_words must be UTF-8"):
        make_reader({"bad_words": np.array([[b"\xff"]], np.object_)}).texts("bad_words")


def test_a_batch_is_refused_with_advice_if_only_one_row_is_read() -> None:
    with pytest.raises(Unsupported, match=r"input_ids has shape \[2, 3\].*Send 2 separate requests"):
        make_reader({"input_ids": np.zeros([2, 3], np.int32)}).array("input_ids")
    with pytest.raises(Unsupported, match=r"end_id has shape \[4\].*Send 4 separate requests"):
        make_reader({"end_id": np.zeros([4], np.int32)}).integer("end_id")


def test_the_error_of_a_wrong_rank_names_the_shape_and_the_expected_one() -> None:
    with pytest.raises(InvalidArgument, match=r"input_ids must have shape \[1, n\], got \[1, 1, 3\]"):
        make_reader({"input_ids": np.zeros([1, 1, 3], np.int32)}).array("input_ids")
    with pytest.raises(InvalidArgument, match=r"stop_words_list must have shape \[1, 2, n\], got \[3, 2\]"):
        make_reader({"stop_words_list": np.zeros([3, 2], np.int32)}).array("stop_words_list")


def test_the_error_of_a_wrong_type_names_both_types() -> None:
    with pytest.raises(InvalidArgument, match="end_id must be INT32, got int64"):
        make_reader({"end_id": np.array([1], np.int64)}).integer("end_id")


def test_an_alias_names_the_same_tensor() -> None:
    assert make_reader({"seed": np.array([5], np.uint64)}).integer("random_seed") == 5


def test_a_tensor_and_its_alias_must_have_the_same_value() -> None:
    five, six = np.array([5], np.uint64), np.array([6], np.uint64)
    assert make_reader({"seed": five, "random_seed": five}).integer("random_seed") == 5
    with pytest.raises(InvalidArgument, match="seed is 6 but random_seed is 5: they are two names"):
        make_reader({"seed": six, "random_seed": five}).integer("random_seed")


def test_a_refusal_names_the_value_and_the_accepted_ones() -> None:
    with pytest.raises(
        Unsupported,
        match=r"lookahead_window_size .*because prompt_lookup_num_tokens, .*got 4, expected it left out or 0$",
    ):
        make_reader({"lookahead_window_size": np.array([[4]], np.int32)}).refuse_unbuilt()
    rows = np.array([[[5, 7, 3], [9, 2, 1]]], np.float16)
    with pytest.raises(
        Unsupported,
        match=r"encoder_input_features .*\[1, 2, 3\] \[5.0, 7.0, 3.0, 9.0, …\], .* an empty tensor$",
    ):
        make_reader({"encoder_input_features": rows}).refuse_unbuilt()
    with pytest.raises(Unsupported, match=r"decoder_text_input .*got 'end'"):
        make_reader(
            {"decoder_text_input": np.array([[b"end"]], np.object_)}, Vocabulary.TEXT
        ).refuse_unbuilt()


def test_text_must_be_utf8() -> None:
    assert decode_utf8("ü".encode(), "text_input") == "ü"
    with pytest.raises(
        InvalidArgument, match="text_input must be UTF-8 text; byte 0xff at position 2 is not"
    ):
        decode_utf8(b"ab\xff", "text_input")


def test_messages_use_the_names_of_the_client() -> None:
    message = [Name("request_output_len"), " is 9, ", Name("runtime_top_p"), " is 2, ", Name("random_seed")]
    error = InvalidArgument(*message)
    tokens = make_reader({"seed": np.array([5], np.uint64)})
    assert str(error.with_names(tokens.shown_name)) == "request_output_len is 9, runtime_top_p is 2, seed"
    text = make_reader({}, Vocabulary.TEXT)
    assert str(error.with_names(text.shown_name)) == "max_tokens is 9, top_p is 2, seed"
