"""Suffix decoding: proposes what followed the longest earlier occurrence of a sequence's last tokens.

Looks in the sequence's own tokens and in recent answers of other requests. Used on the loop thread. Reference:
SuffixDecoding (Oliaro et al. 2024), the method `suffix` in vLLM, by Arctic Inference.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from inflight.core.request.draft_length import DraftLength

MIN_MATCH, MAX_MATCH = 2, 16
"""Occurrences of fewer tokens are not used; those that agree in MAX_MATCH tokens or more count as equally long."""

MAX_PLACES = 16
"""Number of the latest of equally long occurrences that are counted, in the sequence and in other answers."""

CAPACITY = 1 << 16
"""Number of places that are remembered of a sequence, and of all recent answers together."""

MAX_READ = 4096
"""Number of tokens of a sequence that are read for one draft; a longer prompt is read in several iterations."""

_START = -1
"""Stands for the token before the first token of a text."""

Place = tuple[list[int], int]
"""A text and the position of one of its tokens; the tokens up to this position never change."""


class _Branch:
    """The places after some n tokens, if they are more than MAX_PLACES, divided by the token before these.

    Args:
        places: MAX_PLACES of them, oldest first.
        depth: n.

    Attributes:
        places: The latest MAX_PLACES of them, oldest first.
        children: By the token before: a branch, or a list of up to MAX_PLACES places, oldest first.
    """

    __slots__ = ("children", "places")

    def __init__(self, places: list[Place], depth: int) -> None:
        divided: dict[int, list[Place]] = {}
        for place in places:
            text, position = place
            divided.setdefault(text[position - 1 - depth] if depth < position else _START, []).append(place)
        self.places = places
        self.children: dict[int, _Branch | list[Place]] = {**divided}


class SuffixTree:
    """Finds the places in some texts before which the most tokens are equal to given ones.

    The places are divided by the tokens before them, the last one first, which makes a suffix tree of the texts
    read backwards. So one walk finds the longest occurrence, and the oldest place can be forgotten. To need less
    memory, the tree branches only where more than MAX_PLACES places follow the same tokens. Each method but
    `_mend` takes at most MAX_MATCH steps of up to MAX_PLACES places.

    If a method raises at any line, the next one makes the tree anew from its places.

    Args:
        capacity: Number of places that are remembered, at least 1. When there are more, the oldest is forgotten.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._places: deque[Place] = deque()  # oldest first
        # By the last MIN_MATCH tokens as one number; below, by one token at each step.
        self._root: dict[int, _Branch | list[Place]] = {}
        self._is_whole = True  # whether the tree has exactly these places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def latest(self) -> Place | None:
        """The place that was added last; None if there is none."""
        return self._places[-1] if self._places else None

    def add(self, text: list[int], position: int) -> None:
        """Remember the place of the token at `position`, which is at least MIN_MATCH."""
        if not self._is_whole:
            self._mend()
        place = text, position
        self._is_whole = False
        self._places.append(place)
        self._insert(place)
        if len(self._places) > self._capacity:
            self._remove(self._places.popleft())
        self._is_whole = True

    def find(self, tokens: list[int]) -> tuple[int, list[Place]]:
        """Find the places before which the most tokens are equal to the last ones of `tokens`.

        Args:
            tokens: At least MIN_MATCH tokens.

        Returns:
            The number of equal tokens, MAX_MATCH at most, or 0 if there are less than MIN_MATCH; and the latest
            MAX_PLACES of the places, latest first.
        """
        if not self._is_whole:
            self._mend()
        node, depth = self._root.get(_last_two(tokens, len(tokens))), MIN_MATCH
        while isinstance(node, _Branch):
            child = node.children.get(tokens[-1 - depth]) if depth < len(tokens) else None
            if child is None:
                return depth, node.places[::-1]
            node, depth = child, depth + 1
        return (0, []) if node is None else _longest(node, tokens)

    def _insert(self, place: Place) -> None:
        """Add a place that is later than all others in the tree."""
        text, position = place
        children, key, depth = self._root, _last_two(text, position), MIN_MATCH
        while True:
            node = children.get(key)
            if node is None:
                children[key] = [place]
                return
            if isinstance(node, list):
                if len(node) < MAX_PLACES:
                    node.append(place)
                    return
                if depth == MAX_MATCH or key == _START:  # all of them agree as far as they are compared
                    del node[0]
                    node.append(place)
                    return
                node = children[key] = _Branch(node, depth)
            del node.places[0]
            node.places.append(place)
            children, key = node.children, text[position - 1 - depth] if depth < position else _START
            depth += 1

    def _remove(self, place: Place) -> None:
        """Remove the oldest place of the tree."""
        text, position = place
        children, key, depth = self._root, _last_two(text, position), MIN_MATCH
        while True:
            node = children[key]
            places = node.places if isinstance(node, _Branch) else node
            if places[0] is place:  # then there are no others than these, so that the branch is not needed
                if len(places) > 1:
                    children[key] = places[1:]
                else:
                    del children[key]
                return
            if isinstance(node, list):  # it was left out, as later ones agree as far as they are compared
                return
            children, key = node.children, text[position - 1 - depth] if depth < position else _START
            depth += 1

    def _mend(self) -> None:
        """Make the tree anew from its places, after a call that raised."""
        self._root = {}
        for place in self._places:
            self._insert(place)
        self._is_whole = True


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

    def __init__(self, tokens: list[int], most: int, answers: SuffixTree | None = None) -> None:
        self.length = DraftLength(most)
        self._tokens = tokens
        self._own = SuffixTree()
        self._answers = answers
        self._answer: list[int] = []  # of this sequence

    def append(self, token_ids: Iterable[int]) -> None:
        """Take account of new tokens of the answer, which are final."""
        answer = self._answer
        for token_id in token_ids:
            self.length.advance(1)
            if self._answers is not None:
                answer.append(token_id)
                if len(answer) > MIN_MATCH:
                    self._answers.add(answer, len(answer) - 1)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that followed the longest earlier occurrence of the last tokens.

        If several occurrences are equally long, the most frequent of their next tokens is taken at each step, and
        those that continue otherwise are left out. Among equally frequent tokens, that of the sequence itself is
        preferred to that of other answers, then the latest. Empty if the last two tokens did not occur before.
        """
        tokens, own = self._tokens, self._own
        if len(tokens) < MIN_MATCH:
            return ()
        latest = own.latest
        first = max(MIN_MATCH if latest is None else latest[1] + 1, len(tokens) - CAPACITY)
        for position in range(first, min(first + MAX_READ, len(tokens))):
            own.add(tokens, position)
        length, places = own.find(tokens)
        if self._answers is not None:
            other_length, others = self._answers.find(tokens)
            others = [place for place in others if place[0] is not self._answer]
            if other_length > length and others:
                places = others
            elif other_length == length:
                places += others
        return _most_frequent(places, max_tokens)


def _last_two(text: list[int], position: int) -> int:
    """Return the two tokens before `position` as one number; token ids have 32 bits."""
    return text[position - 2] << 32 | text[position - 1]


def _longest(places: list[Place], tokens: list[int]) -> tuple[int, list[Place]]:
    """Return those places before which the most tokens are equal to the last ones of `tokens`, latest first, and
    how many are."""
    tail = tokens[-MAX_MATCH:]
    longest, found = MIN_MATCH, list[Place]()
    for text, position in reversed(places):
        most = min(len(tail), position)
        length = MIN_MATCH
        if text[position - most : position] == tail[len(tail) - most :]:
            length = most
        while length < most and text[position - 1 - length] == tail[-1 - length]:
            length += 1
        if length > longest:
            longest, found = length, []
        if length == longest:
            found.append((text, position))
    return longest, found


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
