"""The known words that a misspelled word may have been meant to be, for error messages. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_LISTED = 10


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is spelled most like `word`; None if none is similar."""
    return next(iter(equally_near(word, known)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" with the known word that is spelled most like `word`; "" if none is similar."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def listed(words: Iterable[str]) -> str:
    """Return the words, separated by commas. Of more than ten words, the last ones are only counted."""
    first, rest = (every := list(words))[:_MOST_LISTED], len(every) - _MOST_LISTED
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def equally_near(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the known words with the smallest edit distance to `word`; [] if none is similar.

    A similar word contains `word`, is a part of it, or differs from it by at most a third of the letters.

    Args:
        word: A misspelled word.
        known: The words that it may have been meant to be.
        cutoff: The least similarity, as in `difflib.get_close_matches`.
    """
    close = difflib.get_close_matches(word, list(known), n=5, cutoff=cutoff)
    distances = {each: _edit_distance(word, each) for each in close}
    similar = [
        each for each in close if word in each or each in word or _is_small(distances[each], word, each)
    ]
    return [each for each in similar if distances[each] == min(distances[other] for other in similar)]


def _is_small(distance: int, one: str, other: str) -> bool:
    return 3 * distance <= max(len(one), len(other))


def _edit_distance(one: str, other: str) -> int:
    """Return how many letters must be inserted, deleted, replaced or swapped to turn one word into the other."""
    before, row = [0], list(range(len(other) + 1))
    for index, letter in enumerate(one, 1):
        earlier, before, row = before, row, [index]
        for column, expected in enumerate(other, 1):
            least = min(before[column] + 1, row[-1] + 1, before[column - 1] + (letter != expected))
            if index > 1 and column > 1 and (letter, one[index - 2]) == (other[column - 2], expected):
                least = min(least, earlier[column - 2] + 1)
            row.append(least)
    return row[-1]
