"""Packed word lists: the specification's example, NVIDIA's empty list, and errors that show the layout."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.errors import InvalidArgument
from inflight.tensors.word_lists import MAX_WORD_IDS, pack_words, read_word_list


def test_the_number_of_ids_in_a_list_is_limited() -> None:
    longest = np.zeros([2, MAX_WORD_IDS], np.int32)
    longest[1] = -1
    longest[1, 0] = MAX_WORD_IDS
    assert read_word_list(longest, "bad_words_list") == ((0,) * MAX_WORD_IDS,)
    with pytest.raises(
        InvalidArgument, match=f"bad_words_list has {MAX_WORD_IDS + 1} ids; .* {MAX_WORD_IDS}"
    ):
        read_word_list(np.zeros([2, MAX_WORD_IDS + 1], np.int32), "bad_words_list")


def read(rows: list) -> tuple[tuple[int, ...], ...]:
    return read_word_list(np.array(rows, np.int32), "bad_words_list")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]], ((5, 7, 3), (9, 2))),
        ([[24044, 76, 1230], [2, 3, -1]], ((24044, 76), (1230,))),
        ([[0], [-1]], ()),
        ([[0], [1]], ((0,),)),
        ([[7, 8], [-1, -1]], ()),
        ([[7, 8, 0, 0], [1, 2, -1, -1]], ((7,), (8,))),
        ([[7, 8], [1, 2]], ((7,), (8,))),
    ],
    ids=str,
)
def test_word_lists_are_read_from_ids_and_offsets(rows: list, words: tuple) -> None:
    assert read(rows) == words


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[5, 7, 3]], r"must have two rows, shape \[1, 2, n\], got shape \[1, 3\]"),
        ([[5], [1], [1]], r"must have two rows, .* got shape \[3, 1\]"),
        ([[5, 7], [2, 1]], r"has an end offset 1 after 2: they must grow, \[2, 1\]"),
        ([[5, 7], [1, 1]], r"has an end offset 1 after 1"),
        ([[5, 7], [0, 2]], r"has an end offset 0 after 0"),
        ([[5, 7], [-2, 2]], r"has an end offset -2 after 0"),
        ([[5, 7], [1, 3]], r"has the end offset 3, but 2 ids"),
        ([[5, 7, 1], [-1, 1, 2]], r"has an end offset after -1 in its second row: \[-1, 1, 2\]"),
    ],
    ids=str,
)
def test_errors_show_the_layout_by_example(rows: list, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^bad_words_list {problem}") as raised:
        read(rows)
    assert "[[5,7,3,9,2],[3,5,-1,-1,-1]] for the words [5,7,3] and [9,2]" in str(raised.value)


@pytest.mark.parametrize("words", [(), ((1,),), ((1, 2), (0,), (3, 4, 5))], ids=str)
def test_word_lists_that_preprocessing_packs_are_unpacked(words: tuple) -> None:
    assert read_word_list(pack_words(words), "x") == words
