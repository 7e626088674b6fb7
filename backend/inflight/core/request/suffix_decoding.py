"""Suffix decoding: proposes what followed the longest earlier occurrence of a sequence's last tokens.

Looks in the sequence's own tokens and in recent answers of other requests. Used on the loop thread. Reference:
SuffixDecoding (Oliaro et al. 2024), the method `suffix` in vLLM. These keep suffix trees. This module keeps a
chain of the places of each pair of tokens, as deflate does, which takes less memory and can forget the oldest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from inflight.core.request.draft_length import DraftLength

MAX_MATCH = 16
"""Occurrences that agree in at least this many tokens count as equally long."""

MAX_PLACES = 16
"""Number of latest occurrences of the last two tokens that are compared, in the sequence and in other answers."""

CAPACITY = 1 << 16
"""Number of places that are remembered of a sequence, and of all recent answers together."""

Place = tuple[list[int], int]
"""A text and the position of one of its tokens."""


class PairPlaces:
    """The places that follow each pair of tokens in some texts, as far as they are among the latest ones.

    Adding a place takes constant time.

    Args:
        capacity: Number of places that are remembered.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._count = 0  # places ever added; the place with number n is in slot n % capacity
        # Each place, and the number of the place before that follows the same pair; -1: none.
        self._slots: list[tuple[Place, int]] = []
        self._latest: dict[int, int] = {}  # number of the latest place, by pair

    def __len__(self) -> int:
        return min(self._count, self._capacity)

    def add(self, text: list[int], position: int) -> None:
        """Remember the place of the token at `position`, at least 2. Tokens of `text` up to it never change.

        If this raises at any line, the other places can still be found.
        """
        pair, number = _pair(text, position), self._count
        entry = (text, position), self._latest.get(pair, -1)
        slot = number % self._capacity
        if number >= self._capacity:
            oldest = _pair(*self._slots[slot][0])
            if self._latest.get(oldest) == number - self._capacity:
                del self._latest[oldest]
        self._slots[slot : slot + 1] = [entry]
        self._count = number + 1
        self._latest[pair] = number

    def find(self, text: list[int]) -> list[Place]:
        """Return the places that follow the last two tokens of `text`, the latest first, up to MAX_PLACES."""
        found: list[Place] = []
        number, oldest = self._latest.get(_pair(text, len(text)), -1), self._count - len(self)
        while number >= oldest and len(found) < MAX_PLACES:
            place, number = self._slots[number % self._capacity]
            found.append(place)
        return found


class SuffixDecoding:
    """The drafts of one sequence by suffix decoding.

    Args:
        tokens: All tokens of the sequence; its owner appends new ones before it calls `append`. They are indexed
            when the first draft is made, so that waiting sequences take neither time nor memory.
        most: Maximum number of tokens of a draft.
        answers: Places in recent answers of all requests that share them; None if this request does not.

    Attributes:
        length: The length that the next draft should have at most, if drafts take time from other sequences.
    """

    def __init__(self, tokens: list[int], most: int, answers: PairPlaces | None = None) -> None:
        self.length = DraftLength(most)
        self._tokens = tokens
        self._own = PairPlaces()
        self._next_position = 2  # of the first token that is not indexed in `_own`
        self._answers = answers
        self._answer: list[int] = []  # of this sequence

    def append(self, token_ids: Iterable[int]) -> None:
        """Take account of new tokens of the answer, which are final."""
        answer = self._answer
        for token_id in token_ids:
            self.length.advance(1)
            if self._answers is not None:
                answer.append(token_id)
                if len(answer) > 2:
                    self._answers.add(answer, len(answer) - 1)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that followed the longest earlier occurrence of the last tokens.

        If several occurrences are equally long, the most frequent of their next tokens is taken at each step, and
        those that continue otherwise are left out. Among equally frequent tokens, that of the sequence itself is
        preferred to that of other answers, then the latest. Empty if the last two tokens did not occur before.
        """
        tokens = self._tokens
        if len(tokens) < 2:
            return ()
        for position in range(max(self._next_position, len(tokens) - CAPACITY), len(tokens)):
            self._own.add(tokens, position)
        self._next_position = max(2, len(tokens))
        places = self._own.find(tokens)
        if self._answers is not None:
            places += [place for place in self._answers.find(tokens) if place[0] is not self._answer]
        return _most_frequent(_longest(places, tokens), max_tokens)


def _pair(text: list[int], position: int) -> int:
    """Return the two tokens before `position` as one number; token ids have 32 bits."""
    return text[position - 2] << 32 | text[position - 1]


def _longest(places: list[Place], tokens: list[int]) -> list[Place]:
    """Return those places before which the most tokens are equal to the last ones of `tokens`."""
    tail = tokens[-MAX_MATCH:]
    longest, found = 0, list[Place]()
    for text, position in places:
        most = min(len(tail), position)
        length = 2
        if text[position - most : position] == tail[len(tail) - most :]:
            length = most
        while length < most and text[position - 1 - length] == tail[-1 - length]:
            length += 1
        if length > longest:
            longest, found = length, []
        if length == longest:
            found.append((text, position))
    return found


def _most_frequent(places: list[Place], max_tokens: int) -> tuple[int, ...]:
    """Return the tokens from these places on, at each step the most frequent one."""
    rests = [text[position : position + max_tokens] for text, position in places]
    draft: list[int] = []
    while rests:
        if rests.count(rests[0]) == len(rests):
            return tuple(rests[0])
        counts = Counter(rest[len(draft)] for rest in rests)
        draft.append(max(counts, key=counts.__getitem__))
        rests = [rest for rest in rests if rest[len(draft) - 1] == draft[-1] and len(rest) > len(draft)]
    return tuple(draft)
