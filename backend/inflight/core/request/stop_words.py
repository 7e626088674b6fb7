"""Token sequences that end an output: whether the newest token completes one.

Costs one dictionary look-up for a token that ends no word, and never more than one for each token of the longest
word, however many words there are. Knows no text: stop strings are found by the front ends. Immutable. Called by
the loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_WORD = -1
"""No token id: a word ends here."""


class StopWords:
    """The stop words of one request. Specification: Inference Request, `stop_words_list`.

    Args:
        words: Token ids of each word, at least one.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._tree: dict[int, Any] = {}  # by the last token, then the one before it, and so on
        self.longest = 0
        """Tokens of the longest word; 0 without words."""
        for word in words:
            node = self._tree
            for token_id in reversed(word):
                node = node.setdefault(token_id, {})
            node[_WORD] = True
            self.longest = max(self.longest, len(word))

    def __bool__(self) -> bool:
        return bool(self._tree)

    def may_end_with(self, token_id: int) -> bool:
        """Whether a word ends with this token, so that the ones before it matter."""
        return token_id in self._tree

    def matches(self, tokens: Sequence[int], num_generated: int) -> bool:
        """Whether `tokens` ends with a word.

        Args:
            tokens: What is known of a sequence, at least one token; of more than the last `longest` nothing is
                read.
            num_generated: How many of them, at the end, are generated: a word has to lie wholly in these.
        """
        node = self._tree
        for place in range(len(tokens) - 1, len(tokens) - 1 - min(num_generated, len(tokens)), -1):
            node = node.get(tokens[place])
            if node is None:
                return False
            if _WORD in node:
                return True
        return False
