"""Token sequences that end an output: whether the newest token completes one.

Costs one dictionary look-up for a token that ends no word. Knows no text: stop strings are found by the front
ends. Immutable. Called by the loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StopWords:
    """The stop words of one request. Specification: Inference Request, `stop_words_list`.

    Args:
        words: Token ids of each word, at least one.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._by_last: dict[int, list[tuple[int, ...]]] = {}
        self.longest = 0
        """Tokens of the longest word; 0 without words."""
        for word in words:
            self._by_last.setdefault(word[-1], []).append(word)
            self.longest = max(self.longest, len(word))

    def __bool__(self) -> bool:
        return bool(self._by_last)

    def may_end_with(self, token_id: int) -> bool:
        """Whether a word ends with this token, so that the ones before it matter."""
        return token_id in self._by_last

    def matches(self, tokens: Sequence[int], num_generated: int) -> bool:
        """Whether `tokens` ends with a word.

        Args:
            tokens: What is known of a sequence, at least one token; of more than the last `longest` nothing is
                read.
            num_generated: How many of them, at the end, are generated: a word has to lie wholly in these.
        """
        return any(
            len(word) <= num_generated and tuple(tokens[-len(word) :]) == word
            for word in self._by_last.get(tokens[-1], ())
        )
