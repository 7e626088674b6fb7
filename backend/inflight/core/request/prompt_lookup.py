"""Prompt lookup drafting: proposes the tokens that followed the last n-gram where it occurred before.

Independent of requests and batches. Used on the loop thread. Reference: transformers
`PromptLookupCandidateGenerator`, vLLM `NgramProposer`. Both search the whole sequence at every step; this module
keeps an index.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAM_SIZES = (3, 2)
"""Lengths of the n-grams that are looked up, longest first. The token that followed a 2-gram before follows
again in about half of the cases; for a 3-gram the share is higher, for a single token only a quarter. On code
and prose, single tokens would save a tenth of the iterations but add half as many rows again."""


_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
"""Numbers of tokens without drafts after a draft of one token was rejected: at first, and at most."""


class DraftLength:
    """A maximum length of a sequence's drafts that follows how many of the earlier ones were accepted.

    A draft that is accepted as a whole doubles it, and one that is rejected as a whole halves it. Otherwise the
    next draft is one token longer than what was accepted. After a rejected draft of one token there are no drafts
    for a while, and longer each time, so that useless drafts cost almost nothing.

    Args:
        most: The request's maximum.
    """

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._num_left = 0  # tokens until the next draft
        self._next_pause = _FIRST_PAUSE

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of the next draft; 0: no draft."""
        return 0 if self._num_left > 0 else self._length

    def advance(self, num_tokens: int) -> None:
        """Count tokens that the sequence got."""
        self._num_left -= num_tokens

    def verified(self, num_tokens: int, num_accepted: int) -> None:
        """Take account of a draft of `num_tokens` tokens, of which the first `num_accepted` were accepted."""
        if num_accepted == num_tokens:
            self._length = max(self._length, min(self._most, 2 * num_tokens))
        elif num_accepted:
            self._length = num_accepted + 1
        elif self._length > 1:
            self._length //= 2
        else:
            self._num_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        if num_accepted:
            self._next_pause = _FIRST_PAUSE


class PromptLookup:
    """An index of a sequence's n-grams: for each n-gram, the position of the token after its latest occurrence.

    Appending a token takes constant time, whatever the length of the sequence.

    Args:
        token_ids: The first tokens.
        max_tokens: Maximum number of tokens of a draft.

    Attributes:
        length: The length that the next draft should have at most, if drafts take time from other sequences.
    """

    def __init__(self, token_ids: Iterable[int] = (), max_tokens: int = 1 << 30) -> None:
        self.length = DraftLength(max_tokens)
        self._tokens: list[int] = []
        # For each n-gram, the position of the token that followed its last occurrence.
        self._next_position: dict[tuple[int, ...], int] = {}
        self.append(token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Append tokens that are final."""
        tokens, index = self._tokens, self._next_position
        for token_id in token_ids:
            # Index the n-grams that end before this token, as it follows them. N-grams that end with this token
            # are not indexed yet, so that `propose` does not find the sequence's last n-gram itself.
            position = len(tokens)
            for size in NGRAM_SIZES:
                if size <= position:
                    index[tuple(tokens[position - size :])] = position
            tokens.append(token_id)
            self.length.advance(1)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that followed the latest earlier occurrence of the longest n-gram.

        Empty if no n-gram occurred before; shorter than `max_tokens` at the end of the sequence.
        """
        for size in NGRAM_SIZES:
            position = self._next_position.get(tuple(self._tokens[-size:]))
            if position is not None:
                return tuple(self._tokens[position : position + max_tokens])
        return ()
