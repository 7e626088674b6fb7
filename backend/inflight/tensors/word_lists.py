"""TensorRT-LLM's packed word lists, [2, n]: row 0 has the ids of all words, row 1 the end offset of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.errors import InvalidArgument, Name
from inflight.tensors.reader import TensorReader

MAX_WORD_IDS = 1 << 16
"""Maximum number of ids in all words of a list together."""

_WORD_LAYOUT = (
    "The first row holds the ids of all words, the second row after each word how many ids there are so far, "
    "filled up with -1: [[5,7,3,9,2],[3,5,-1,-1,-1]] for the words [5,7,3] and [9,2]"
)

Words = tuple[tuple[int, ...], ...]
"""The ids of each word."""

_END = -1  # pads the second row


def read_words(reader: TensorReader, name: str) -> Words:
    """Return the words of the tensor `name`; none if absent. Errors show the layout by an example."""
    try:
        array = reader.array(name)
    except InvalidArgument as error:
        raise InvalidArgument(*error.args, f". {_WORD_LAYOUT}") from None
    return () if array is None else read_word_list(array, reader.shown_name(name))


def read_word_list(array: NDArray[Any], name: str) -> Words:
    """Return the words of TensorRT-LLM's packed list, a [2, n] array.

    NVIDIA's clients send [[0], [-1]] as an empty list. Ids after the end of the last word are ignored: they
    pad the shorter lists of a batch.

    Args:
        array: Integers, without the batch dimension.
        name: The tensor's name in error messages.

    Raises:
        InvalidArgument: There are too many ids, or the rows or end offsets are wrong; then the message shows the
            layout by an example.
    """
    if array.ndim != 2 or array.shape[0] != 2:
        raise _broken(name, f"must have two rows, shape [1, 2, n], got shape {list(array.shape)}")
    if array.shape[1] > MAX_WORD_IDS:
        raise InvalidArgument(
            Name(name),
            f" has {array.shape[1]} ids; this server takes at most {MAX_WORD_IDS} in a list of words",
        )
    ids, ends = array.tolist()
    count = ends.index(_END) if _END in ends else len(ends)
    if any(end != _END for end in ends[count:]):
        raise _broken(name, f"has an end offset after -1 in its second row: {_shown(ends)}")
    starts = [0, *ends[: count - 1]] if count else []
    for start, end in zip(starts, ends):
        if end <= start:
            raise _broken(name, f"has an end offset {end} after {start}: they must grow, {_shown(ends)}")
        if end > len(ids):
            raise _broken(name, f"has the end offset {end}, but {len(ids)} ids")
    return tuple(tuple(ids[start:end]) for start, end in zip(starts, ends))


def _broken(name: str, problem: str) -> InvalidArgument:
    return InvalidArgument(Name(name), f" {problem}. {_WORD_LAYOUT}")


def _shown(values: list[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', …' if len(values) > 8 else ''}]"


def pack_words(words: Sequence[Sequence[int]]) -> NDArray[Any]:
    """Pack words as a [2, n] array, padded with id 0 and offset -1; [[0], [-1]] for no words."""
    flat = [token_id for word in words for token_id in word]
    if not flat:
        return np.array([[0], [-1]])
    offsets = np.cumsum([len(word) for word in words if word])
    return np.array([flat, [*offsets, *[-1] * (len(flat) - len(offsets))]])
