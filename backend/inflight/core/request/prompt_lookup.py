"""Prompt lookup drafting: proposes the tokens that came after an earlier occurrence of the last n-gram.

Independent of requests and batches. Used on the loop thread. Reference: transformers
`PromptLookupCandidateGenerator`, vLLM `NgramProposer`. Both search the whole sequence at every step; this module
keeps an index.
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight.core.request.draft_length import DraftLength

NGRAM_SIZES = (3, 2)
"""Lengths of the n-grams that are looked up, longest first. The token that followed a 2-gram before follows
again in about half of the cases; for a 3-gram the share is higher, for a single token only a quarter. On code
and prose, single tokens would save a tenth of the iterations but add half as many rows again."""


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
