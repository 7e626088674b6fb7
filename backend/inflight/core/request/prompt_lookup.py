"""Prompt lookup drafting: guesses the next tokens from what followed the same n-gram earlier in the sequence.

It knows nothing of requests or batches. Only the loop thread calls it. Reference: transformers
`PromptLookupCandidateGenerator`, vLLM `NgramProposer`. Both search the whole sequence at every step; this module
keeps an index.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAM_SIZES = (3, 2)
"""Lengths of the n-grams that are looked up, longest first. After a repeated 2-gram the next token is the same
about half of the time, after a 3-gram more often. A single token would be right a quarter of the time: on code and
prose that saves a tenth of the iterations but adds half as many rows again."""


class PromptLookup:
    """An index of a sequence's n-grams: the position of the token after the latest occurrence of each.

    Appending a token takes constant time, whatever the length of the sequence.

    Args:
        token_ids: The first tokens.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        # By n-gram, the position of the token that followed its last occurrence.
        self._next_position: dict[tuple[int, ...], int] = {}
        self.append(token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Append tokens that are final."""
        tokens, index = self._tokens, self._next_position
        for token_id in token_ids:
            # Index the n-grams that end before this token, which is now their next token. N-grams that end with
            # this token are not indexed yet, so that they do not find themselves.
            position = len(tokens)
            for size in NGRAM_SIZES:
                if size <= position:
                    index[tuple(tokens[position - size :])] = position
            tokens.append(token_id)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that followed the latest earlier occurrence of the longest n-gram.

        Empty if no n-gram occurred before; shorter than `max_tokens` at the end of the sequence.
        """
        for size in NGRAM_SIZES:
            position = self._next_position.get(tuple(self._tokens[-size:]))
            if position is not None:
                return tuple(self._tokens[position : position + max_tokens])
        return ()
