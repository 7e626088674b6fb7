"""stop_words_list and bad_words_list: TensorRT-LLM's packed word lists, to one tuple of ids a word.

Owns the layout and what is said of one that is broken. Does not know what a word is for, nor which ids a model
has. Pure.
"""

from __future__ import annotations

import numpy as np

from inflight.errors import InvalidArgument

Words = tuple[tuple[int, ...], ...]

LAYOUT = (
    "The first row holds the ids of all words, the second row after each word how many ids there are so far, "
    "filled up with -1: [[5,7,3,9,2],[3,5,-1,-1,-1]] for the words [5,7,3] and [9,2]"
)
"""What to tell whoever got it wrong."""

MAX_WORD_IDS = 1 << 16
"""Most ids in all words of a list together."""

_NONE = -1


def read_word_list(array: np.ndarray, name: str) -> Words:
    """The words of a [2, n] array.

    [[0], [-1]], an empty list as NVIDIA's clients send it, has no words. Ids after the last word's end are
    ignored: they fill up the shorter lists of a batch.

    Args:
        array: Integers, without the batch dimension.
        name: The tensor's name for the client.

    Raises:
        InvalidArgument: There are too many ids, or the rows or the end offsets are wrong; then the message shows
            the layout by an example.
    """
    if array.ndim != 2 or array.shape[0] != 2:
        raise _broken(name, f"must have two rows, shape [1, 2, n], got shape {list(array.shape)}")
    if array.shape[1] > MAX_WORD_IDS:
        raise InvalidArgument(
            f"{name} has {array.shape[1]} ids; this server takes at most {MAX_WORD_IDS} in a list of words"
        )
    ids, ends = array.tolist()
    count = ends.index(_NONE) if _NONE in ends else len(ends)
    if any(end != _NONE for end in ends[count:]):
        raise _broken(name, f"has an end offset after -1 in its second row: {_shown(ends)}")
    starts = [0, *ends[: count - 1]] if count else []
    for start, end in zip(starts, ends):
        if end <= start:
            raise _broken(name, f"has an end offset {end} after {start}: they must grow, {_shown(ends)}")
        if end > len(ids):
            raise _broken(name, f"has the end offset {end}, but {len(ids)} ids")
    return tuple(tuple(ids[start:end]) for start, end in zip(starts, ends))


def _broken(name: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{name} {problem}. {LAYOUT}")


def _shown(values: list[int]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', …' if len(values) > 8 else ''}]"
