"""Prompt lookup drafting: guesses a sequence's next tokens from what followed its last ones earlier.

It knows nothing of requests or batches. Only the loop thread calls it.
Reference: transformers `PromptLookupCandidateGenerator`, vLLM `NgramProposer`; both search the whole sequence at
every step, this keeps an index.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAM_SIZES = (3, 2)
"""Lengths of the n-grams that are looked up, longest first. Two tokens found again are followed by the same third
one about half of the time, three by more. A single token is right in a quarter of the cases: on code and prose it
saves a tenth of the iterations and costs half as many rows again."""


class PromptLookup:
    """An index of a sequence's n-grams: where each was seen last, and so what followed it.

    An appended token costs the same however long the sequence is.

    Args:
        token_ids: The first tokens.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        # By n-gram, the position of the token that followed its last occurrence.
        self._next_position: dict[tuple[int, ...], int] = {}
        self.append(token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens that the sequence now has for certain."""
        tokens, index = self._tokens, self._next_position
        for token_id in token_ids:
            # The n-grams that end before this token: they have a next token now. Those that end with it have
            # none, and so are not found as their own earlier occurrence.
            position = len(tokens)
            for size in NGRAM_SIZES:
                if size <= position:
                    index[tuple(tokens[position - size :])] = position
            tokens.append(token_id)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """At most `max_tokens` tokens that followed the most recent earlier occurrence of the longest n-gram.

        Empty if the last tokens are new; fewer than `max_tokens` where the sequence's known tokens end.
        """
        for size in NGRAM_SIZES:
            position = self._next_position.get(tuple(self._tokens[-size:]))
            if position is not None:
                return tuple(self._tokens[position : position + max_tokens])
        return ()
